import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufleet_agent.bench import Settings
from gpufleet_agent.benches import METRICS
from gpufleet_agent.gate import Rules
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.pipe import Frames
from gpufleet_agent.probe import Sweep

HERE = Path(__file__).parent
CFLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-fvisibility=hidden")
SOURCES = {
    "libcuda.so.1": HERE / "fake_cuda.c",
    "libnvidia-ml.so.1": HERE.parent / "nvml_contract" / "fake_nvml.c",
}
NAMES = [metric.name for metric in METRICS]
LISTED = "number nvmlDeviceGetComputeRunningProcesses_v3"
QUIET = (
    "number nvmlDeviceGetUtilizationRates 0 0",
    "number nvmlDeviceGetPowerUsage 70000",
    "number nvmlDeviceGetComputeMode 0",
    f"{LISTED} 0",
)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both libraries of a driver that is none."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler, and CI must run these tests")
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    for name, source in SOURCES.items():
        command = [compiler, *CFLAGS, f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
        subprocess.run(command, check=True, timeout=60)
    return folder


@dataclass
class Rig:
    """A machine with two cards of the fake driver, and bench processes on it."""

    root: Path
    libraries: Path
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for slot in range(2):
            device = self.root / f"sys/bus/pci/devices/0000:{slot + 16:02x}:00.0"
            device.mkdir(parents=True)
            for name, text in (("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200")):
                (device / name).write_text(f"{text}\n")
            (device / "config").write_bytes(b"\xde\x10\x30\x23")
            (device / "local_cpulist").write_text("0\n")
        (self.root / "proc").mkdir()
        self.say()
        self.cuda()

    @property
    def lock(self) -> Path:
        return self.root / "run/bench.lock"

    def say(self, *lines: str) -> None:
        """What the NVML half answers from now on."""
        self._write("nvml", (*QUIET, *lines))

    def cuda(self, *lines: str) -> None:
        """How the CUDA half behaves from now on."""
        self._write("cuda", lines)

    def _write(self, name: str, lines: tuple[str, ...]) -> None:
        new = self.root / f"{name}.new"
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.root / name)

    def log(self, call: str = "") -> list[tuple[float, str, str]]:
        """(time, call, arguments) of the CUDA calls."""
        path = self.root / "cuda.log"
        lines = [line.split(" ", 2) for line in path.read_text().splitlines()] if path.exists() else []
        return [(float(at), name, text) for at, name, text in lines if call in ("", name)]

    def count(self, call: str) -> int:
        return len(self.log(call))

    def settings(self, bench: str, **more: Any) -> Settings:
        given: dict[str, Any] = {"rules": Rules(mem_mib=1 << 20), **more}
        host = HostSettings(driver="nvml", root=str(self.root))
        return Settings(bench=bench, host=host, state_dir=str(self.root), lock=str(self.lock), **given)

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.libraries),
            "FAKE_NVML": str(self.root / "nvml"),
            "FAKE_CUDA": str(self.root / "cuda"),
            "FAKE_CUDA_LOG": str(self.root / "cuda.log"),
        }

    def start(self, settings: Settings) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gpufleet_agent.bench", msgspec.json.encode(settings).decode()]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment()
        )
        self.started.append(process)
        return process

    def rows(self, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> list[dict[str, Any]]:
        assert process.stdout is not None
        frames, found = Frames(), []
        while data := os.read(process.stdout.fileno(), 1 << 16):
            found += list(frames.feed(data))
        process.wait(timeout_s)
        sweeps = [one for one in found if isinstance(one, Sweep)]
        return [dict(zip(NAMES, row, strict=True)) for sweep in sweeps for row in sweep.rows]

    def run(self, bench: str, **more: Any) -> list[dict[str, Any]]:
        return self.rows(self.start(self.settings(bench, **{"force": True, **more})))

    @staticmethod
    def wait_for(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.005)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait(90)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


class Caller:
    """One process for many runs of the library itself, each on its own log."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        command = [sys.executable, str(HERE / "child.py"), str(rig.root)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=rig.environment()
        )
        rig.started.append(self.process)

    def run(self, bench: str, *how: str) -> tuple[str, float | None, str]:
        """(status, value, reason) of a bench while the library behaves so."""
        self.rig.cuda(*how)
        (self.rig.root / "cuda.log").unlink(missing_ok=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(bench) + b"\n")
        self.process.stdin.flush()
        status, value, reason = msgspec.json.decode(self.process.stdout.readline())
        return status, value, reason

    def longest_ms(self) -> float:
        """The most that the card had to do at once in the last run, by its own clock."""
        return max(float(text) for _, _, text in self.rig.log("elapsed"))


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory, driver: Path) -> Iterator[Caller]:
    rig = Rig(tmp_path_factory.mktemp("caller") / "host", driver)
    yield Caller(rig)
    rig.close()


@pytest.fixture
def rig(tmp_path: Path, driver: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "host", driver)
    yield made
    made.close()
