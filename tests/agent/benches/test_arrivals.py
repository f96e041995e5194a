"""Real bench processes on a made driver, and jobs that come to their card."""

import random
import subprocess
import time
from typing import Any

import pytest

LISTED = "number nvmlDeviceGetComputeRunningProcesses_v3"
JOB = f"{LISTED}@0 1 4711 1000"
CARD = "gpu:GPU-00000000-0000-4000-8000-000000000000"


def slowly(rig: Any) -> None:
    """Ten turns of copies: about a second and a half of them."""
    rig.cuda("slow cuEventSynchronize 150000")


def test_M01_a_real_run_makes_way_for_a_job_within_a_second(rig: Any) -> None:
    slowly(rig)
    process = rig.start(rig.settings("h2d", entity=CARD))
    rig.wait_for(lambda: rig.count("cuEventSynchronize") >= 2)
    rig.say(JOB)
    came = time.monotonic()
    (row,) = rig.rows(process)
    assert (row["status"], row["value"], row["reason"]) == ("preempted", None, "a job came: process 4711")
    assert rig.count("cuMemHostAlloc") == rig.count("cuMemFreeHost") == 1
    gone = rig.log("cuCtxDestroy_v2")[0][0]
    assert gone - came <= 1.0


def test_M01_the_other_card_of_the_host_is_measured_all_the_same(rig: Any) -> None:
    rig.say(JOB)
    rows = rig.run("clock", force=False)
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("skipped", "in use by process 4711"), ("ok", ""),
    ]  # fmt: skip
    assert [row["value"] is None for row in rows] == [True, False]


def test_M01_a_host_bench_waits_for_all_cards(rig: Any) -> None:
    rig.say(JOB)
    (row,) = rig.run("memcpy", force=False)
    assert (row["status"], row["value"]) == ("skipped", None)
    assert "0000:10:00.0: in use by process 4711" in row["reason"] or "host is busy" in row["reason"]


def test_a_run_that_a_scheduler_waits_for_gives_it_the_lock(rig: Any) -> None:
    slowly(rig)
    process = rig.start(rig.settings("h2d", force=True))
    rig.wait_for(lambda: rig.count("cuEventSynchronize") >= 2)
    asked = time.monotonic()
    assert subprocess.run(["flock", str(rig.lock), "true"], timeout=30, check=False).returncode == 0
    rows = rig.rows(process)
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("preempted", "the lock is wanted"), ("skipped", "the lock is wanted"),
    ]  # fmt: skip
    assert rig.log("cuCtxDestroy_v2")[0][0] - asked <= 1.0


def test_a_card_that_has_had_its_time_this_hour_is_left_alone(rig: Any) -> None:
    rows = rig.run("clock", force=False, left_s={CARD: 2.9})
    assert [row["status"] for row in rows] == ["skipped", "ok"]
    assert rows[0]["reason"].startswith("budget: 2.9 of 10 s per hour are left")


STAGES = ("before", "during", "after")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(21))
def test_no_real_run_beside_a_job_has_a_value(rig: Any, seed: int) -> None:
    dice, stage = random.Random(seed), STAGES[seed % 3]
    slowly(rig)
    process = rig.start(rig.settings("h2d", entity=CARD))
    if stage == "before":
        time.sleep(dice.uniform(0.0, 2.0))
    elif stage == "during":
        rig.wait_for(lambda: rig.count("cuEventSynchronize") >= dice.randint(1, 9))
        time.sleep(dice.uniform(0.0, 0.14))
    else:
        rig.wait_for(lambda: rig.count("cuCtxDestroy_v2"))
    came = time.monotonic()
    rig.say(JOB)
    (row,) = rig.rows(process)
    log = rig.log()
    copies = [at for at, name, _ in log if name == "cuMemcpyHtoDAsync_v2"]
    if row["status"] == "ok":
        assert copies[-1] < came, "measured beside a job"
    else:
        assert row["value"] is None
    if row["status"] == "failed":  # on a machine so slow that the run had its time first
        assert row["reason"].startswith("it took longer than its")
        return
    assert (
        row["status"]
        in {
            "before": ("skipped", "preempted"),
            "during": ("preempted", "contaminated"),
            "after": ("contaminated", "ok"),
        }[stage]
    )
    if row["status"] == "preempted":
        assert next(at for at, name, _ in log if name == "cuCtxDestroy_v2") - came <= 1.0
