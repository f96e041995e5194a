"""A real PyTorch DataLoader without and with workers: `make test-torch TORCH_PYTHON=...`."""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.metric import Null, Row
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.loader import Loaders

PYTHON = os.environ.get("GPUFLEET_TORCH_PYTHON", "")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-torch says which Python has PyTorch")


@pytest.fixture
def loaders(tmp_path: Path) -> Iterator[Loaders]:
    made = Loaders(tmp_path / "loader.sock")
    assert made.open()
    yield made
    made.close()


def of(rows: list[Row], pid: int) -> list[Row]:
    return [row for row in rows if row["pid"] == pid]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_real_dataloader_is_measured_right(tmp_path: Path, loaders: Loaders, workers: int) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(HERE.parents[1] / "agent"),
        "GPUFLEET_LOADER_SOCK": str(tmp_path / "loader.sock"),
    }
    trainer = subprocess.Popen(
        [PYTHON, str(HERE / "trainer.py"), str(workers)],
        env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert trainer.stdout is not None
    host, most = SysfsHost(), 0
    told: list[Row] = []
    deadline = time.monotonic() + 100
    try:
        while not select.select([trainer.stdout], [], [], 0)[0]:  # it prints when it is through
            seen = of(list(host.rows("loader")), trainer.pid)
            most = max([most, *(int(str(row["workers"])) for row in seen)])
            told = of(loaders.rows(), trainer.pid) or told
            assert trainer.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        printed, errors = trainer.communicate(timeout=60)
    own = json.loads(printed)
    while not told or told[0]["fetches_total"] != own["fetches"]:
        told = of(loaders.rows(), trainer.pid) or told
        assert time.monotonic() < deadline, errors
        time.sleep(0.1)
    (row,) = told
    wait = float(str(row["wait_s_total"]))
    # what the hook does itself and what the machine does in between is in the other figure
    assert wait == pytest.approx(own["wait_s"], rel=0.03, abs=0.001 * own["fetches"])
    assert (row["workers"], str(row["lib"])[:6]) == (workers, "torch-")
    assert most == workers, "workers are known by their name"
    assert isinstance(row["starved_total"], Null) == (workers == 0)
    assert float(str(row["startup_s_total"])) > 0.03
    print(f"PyTorch {own['torch']}, {workers} workers: waited {wait:.3f} s, by itself {own['wait_s']:.3f} s")
