"""`fleet-agent bench --quick`, as a scheduler calls it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpufleet_agent import hook
from gpufleet_agent.gate import Lock

pytestmark = pytest.mark.slow  # each is a process that a scheduler would start

LISTED = "number nvmlDeviceGetComputeRunningProcesses_v3"


def start(rig: Any, *words: str) -> subprocess.Popen[str]:
    config = rig.root / "agent.toml"
    config.write_text(
        f'driver = "nvml"\nroot = "{rig.root}"\nstate_dir = "{rig.root}/state"\n'
        f'runtime_dir = "{rig.root}/run"\n'
        "[gate]\nmem_mib = 1000000\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gpufleet_agent.main", "bench", "--config", str(config), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=rig.environment(),
    )  # fmt: skip
    rig.started.append(process)
    return process


def end(process: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=timeout_s)
    return process.returncode, out, errors


def quick(rig: Any, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    status, out, errors = end(start(rig, "--quick", "-o", "json", *words))
    return status, json.loads(out)["items"], errors


def test_free_cards_are_measured_and_that_is_all_right(rig: Any) -> None:
    status, rows, errors = quick(rig, "--deadline", "60s", "--floor", "h2d=40", "--floor", "clock=1500")
    assert (status, errors) == (0, "")
    assert [row["bench"] for row in rows] == ["h2d", "h2d", "clock", "clock"]
    assert [(row["status"], row["below"]) for row in rows] == [("ok", False)] * 4
    assert rows[0]["floor"] == 40


def test_a_card_below_its_floor_is_told_by_the_exit_status(rig: Any) -> None:
    rig.cuda("rate 30")
    status, rows, _ = quick(rig, "--deadline", "60s", "--floor", "h2d=40")
    assert status == 1
    assert [row["below"] for row in rows] == [True, True, False, False]


def test_a_busy_card_is_not_judged(rig: Any) -> None:
    rig.say(f"{LISTED}@0 1 4711 1000")
    status, rows, _ = quick(rig, "--deadline", "30s", "--floor", "h2d=1")
    assert status == 3
    assert {row["status"] for row in rows if row["entity"].endswith("00")} == {"skipped"}
    assert rig.count("cuCtxCreate_v2") == len([row for row in rows if row["status"] == "ok"])


def test_a_card_that_errs_is_told_like_one_that_is_below(rig: Any) -> None:
    rig.cuda("corrupt copy")
    status, rows, _ = quick(rig, "--deadline", "60s")
    assert status == 1
    assert rows[0]["status"] == "failed"


def test_without_a_driver_nothing_is_judged(rig: Any) -> None:
    rig.cuda("fail cuInit 100")
    status, rows, _ = quick(rig, "--deadline", "60s")
    assert status == 3
    assert {row["status"] for row in rows} == {"unsupported"}


@pytest.mark.parametrize(
    "words",
    [("h2d", "--quick"), ("--quick", "--deadline", "soon"), ("--quick", "--floor", "h2d"), (),
     ("--quick", "--floor", "h2d=-1"), ("--quick", "--floor", "nonsense=1"),
     ("--quick", "--floor", "h2d=nan")],
)  # fmt: skip
def test_wrong_usage_has_a_status_of_its_own(rig: Any, words: tuple[str, ...]) -> None:
    status, out, errors = end(start(rig, *words))
    assert (status, out) == (2, "")
    assert errors


@pytest.mark.parametrize("stuck", [False, True])
def test_it_is_gone_within_a_second_of_sigterm(rig: Any, stuck: bool) -> None:
    rig.cuda("block cuEventSynchronize" if stuck else "slow cuEventSynchronize 60000")
    process = start(rig, "--quick", "-o", "json", "--deadline", "60s")
    rig.wait_for(lambda: rig.count("cuEventSynchronize"))
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    status, out, errors = end(process)
    assert time.monotonic() - told < 10  # one second where nothing else runs
    assert status == 3
    assert json.loads(out)["items"] == []
    assert "told to stop" in errors


def running(root: Path) -> list[int]:
    """Processes that were told of this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(root).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
def test_whenever_it_is_told_to_stop_nobody_is_left_and_nothing_half_done_is_good(
    rig: Any, calls: int
) -> None:
    rig.cuda("slow cuEventSynchronize 20000")
    process = start(rig, "--quick", "-o", "json", "--deadline", "60s")
    rig.wait_for(lambda: rig.count("") >= calls or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    status, out, _ = end(process, 90)
    rig.wait_for(lambda: not running(rig.root))
    rows = json.loads(out)["items"] if out else []
    for row in rows:
        assert (row["value"] is not None) == (row["status"] == "ok")
    whole = len(rows) == 4 and {row["status"] for row in rows} == {"ok"}
    assert status in (hook.OK if whole else hook.UNKNOWN, -signal.SIGTERM)


def test_it_ends_by_its_deadline_when_a_driver_call_does_not_return(rig: Any) -> None:
    rig.cuda("block cuInit")
    status, out, errors = end(start(rig, "--quick", "--deadline", "4s"))
    assert (status, out) == (3, "")
    assert "not done within 4 s" in errors


def test_an_agents_bench_makes_way_for_the_hook(rig: Any) -> None:
    rig.cuda("block cuEventSynchronize")
    agents = rig.start(rig.settings("hbm", force=True))
    rig.wait_for(lambda: rig.count("cuEventSynchronize"))
    lock = Lock(os.open(rig.lock, os.O_RDONLY))
    hooks = start(rig, "--quick", "-o", "json", "--deadline", "60s")
    rig.wait_for(lock.wanted)
    lock.release()
    rig.cuda()
    assert rig.rows(agents)[-1]["reason"] == "the lock is wanted"
    status, out, _ = end(hooks)
    assert status == 0
    assert len(json.loads(out)["items"]) == 4


def test_a_scheduler_that_holds_the_lock_keeps_the_hook_out_too(rig: Any, tmp_path: Path) -> None:
    rig.lock.parent.mkdir(exist_ok=True)
    rig.lock.touch()
    held = subprocess.Popen(["flock", str(rig.lock), "sleep", "60"])
    try:
        rig.wait_for(lambda: f":{os.stat(rig.lock).st_ino} " in Path("/proc/locks").read_text())
        status, rows, _ = quick(rig, "--deadline", "30s")
    finally:
        held.terminate()
        held.wait(90)
    assert status == 3
    assert {row["reason"] for row in rows} == {"another bench runs, or a scheduler holds the lock"}


def test_statuses() -> None:
    row: hook.Row = {"status": "ok", "below": False}
    assert hook.Outcome([row]).status == hook.OK
    assert hook.Outcome([row], "told to stop").status == hook.UNKNOWN
    assert hook.Outcome([]).status == hook.UNKNOWN
    assert hook.Outcome([row, {"status": "skipped", "below": False}]).status == hook.UNKNOWN
    assert (
        hook.Outcome([{"status": "skipped", "below": False}, {"status": "ok", "below": True}]).status
        == hook.BELOW
    )
    assert hook.Outcome([row, {"status": "hung", "below": False}]).status == hook.BELOW
    broken: hook.Row = {"entity": "node:", "status": "failed", "below": False}
    assert hook.Outcome([row, broken]).status == hook.UNKNOWN, "no card failed: nothing to drain a node for"


def test_a_lock_that_cannot_be_taken_drains_no_node(rig: Any) -> None:
    rig.lock.mkdir(parents=True)
    status, rows, _ = quick(rig, "--deadline", "30s")
    assert status == 3
    assert {row["status"] for row in rows} == {"skipped"}
    assert all("cannot be taken: Is a directory" in str(row["reason"]) for row in rows)
