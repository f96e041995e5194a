"""The small forms of `make bench-detect`: the real judge over simulated fleets with planted faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_small_fleet_is_judged_as_it_should_be() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.detect", "--small", "--json", "--part", "benches"],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["gpu_days"] > 400
    assert told["bursts"] >= 2, "a fleet without interference proves nothing"
    assert told["false"] == []
    assert (told["fleet_steps"], told["fleet_events"]) == (1, 1)
    found = [one for one in told["found"] if one[0] in ("step", "ramp")]
    large = [samples for kind, size, samples, _ in found if size >= 0.1]
    assert len(large) >= 5
    assert all(samples is not None and samples <= 4 for samples in large), large
    small = [samples for _, size, samples, _ in found if 0.03 <= size < 0.1]
    assert len(small) >= 5
    assert all(samples is not None and samples <= 30 for samples in small), small
    assert {code for _, _, _, code in found if code} == {"slower", "drifting"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_small_stretch_of_the_probe_rules_is_judged_as_it_should_be() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.detect", "--small", "--json", "--part", "probes"],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["false"] == []
    assert min(told["met"].values()) >= 1, "what no host met proves nothing"
    assert told["met"]["one blip"] >= 2, "two single samples must not add up"
    assert len(told["met"]) == 13
    found = {kind: (seconds, samples, bound_s) for kind, seconds, samples, _, bound_s in told["found"]}
    assert all(seconds is not None for seconds, _, _ in found.values()), found
    counted = {kind: (seconds, bound_s) for kind, (seconds, samples, bound_s) in found.items() if samples}
    assert {
        "card lost", "card not listed", "card off the bus", "all cards lost",
        "power brake", "hardware thermal", "driver call hangs", "memory error",
    } == set(counted)  # fmt: skip
    assert all(seconds <= bound_s for seconds, bound_s in counted.values()), counted
    assert 90 <= found["node silent"][0] <= 96
