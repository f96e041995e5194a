import ast
import itertools
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpufleet_agent
from gpufleet.metric import Null, Row, Value
from gpufleet_agent import probe, sampler
from gpufleet_agent.drivers import DriverError, Host, Item
from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.guard import GuardedHost, HostSettings
from gpufleet_agent.pipe import Command, Frames, Inventory, Message, Skip
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import gpu
from gpufleet_agent.sampler import Sampler, Settings, next_due
from gpufleet_agent.scenario import parse

SOURCES = sorted(Path(gpufleet_agent.__file__).parent.rglob("*.py"))


@given(st.floats(0, 1e6), st.floats(0.1, 1e5), st.floats(0, 1e6))
def test_the_next_tick_is_ahead_on_the_grid_and_nothing_is_made_up_for(
    due: float, every: float, late: float
) -> None:
    now = due + late
    following = next_due(due, every, now)
    assert now < following + 1e-6 * every
    assert following - now <= every * (1 + 1e-6)
    steps = (following - due) / every
    assert steps == pytest.approx(round(steps), abs=1e-4)


class FakeProbe:
    EVERY = 1.0
    METRICS = gpu.METRICS

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.runs: list[float] = []

    def read(self, host: Host, /) -> Iterable[Row]:
        self.runs.append(time.monotonic())
        time.sleep(self.takes_s)
        return ()


def play(
    patch: pytest.MonkeyPatch, probes: dict[str, tuple[FakeProbe, float]], seconds: float
) -> list[Message]:
    """Run the loop in this process for a while; what came up the pipe."""
    patch.setattr(sampler, "PROBES", {name: one for name, (one, _) in probes.items()})
    reads, writes = os.pipe()
    commands, tell = os.pipe()
    settings = Settings(
        host=HostSettings(driver="none"), probes={name: every for name, (_, every) in probes.items()}
    )
    loop = Sampler(settings, GuardedHost(SysfsHost(Path("/"))), None, writes, commands)
    threading.Timer(seconds, os.close, (tell,)).start()
    loop.forever()
    os.close(writes)
    frames = Frames()
    messages = [
        message for data in iter(lambda: os.read(reads, 1 << 16), b"") for message in frames.feed(data)
    ]
    os.close(reads)
    os.close(commands)
    return messages


def test_T01_sampling_does_not_know_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    real = time.time_ns

    def stepped() -> int:
        return real() // 1000 + (-30_000_000 if time.monotonic() - began > 0.6 else 0)

    monkeypatch.setattr(probe, "wall_us", stepped)
    one = FakeProbe()
    messages = play(monkeypatch, {"one": (one, 0.1)}, 1.5)
    gaps = [after - before for before, after in zip(one.runs, one.runs[1:], strict=False)]
    assert max(gaps) < 5 * 0.1 + 0.5  # generous: a busy machine
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.1, rel=0.5)
    stamps = [message.ts_us for message in messages if isinstance(message, Sweep)]
    assert any(after < before for before, after in itertools.pairwise(stamps))
    monos = [message.mono_us for message in messages if isinstance(message, Sweep)]
    assert monos == sorted(monos)


def test_a_probe_that_takes_longer_than_its_interval_is_not_run_in_bursts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, quick = FakeProbe(takes_s=0.35), FakeProbe()
    play(monkeypatch, {"slow": (slow, 0.1), "quick": (quick, 0.5)}, 1.6)
    assert 2 <= len(slow.runs) <= 5
    assert min(after - before for before, after in zip(quick.runs, quick.runs[1:], strict=False)) > 0.1


def test_commands_change_intervals_and_ask_for_the_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    one = FakeProbe()
    monkeypatch.setattr(sampler, "PROBES", {"gpu": one})
    reads, writes = os.pipe()
    commands, tell = os.pipe()
    loop = Sampler(
        Settings(host=HostSettings(driver="none"), probes={"gpu": 3600.0}),
        GuardedHost(SysfsHost(Path("/"))), None, writes, commands,
    )  # fmt: skip
    for command in (Command(probe="gpu", every_s=0.1), Command(inventory=True)):
        os.write(tell, msgspec.json.encode(command) + b"\n")
    os.write(tell, b"nonsense\n")
    threading.Timer(0.6, os.close, (tell,)).start()
    loop.forever()
    os.close(writes)
    assert len(one.runs) >= 3
    inventories = [
        message for message in Frames().feed(os.read(reads, 1 << 20)) if isinstance(message, Inventory)
    ]
    assert len(inventories) == 2
    os.close(reads)
    os.close(commands)


def start(settings: Settings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gpufleet_agent.sampler", msgspec.json.encode(settings).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )


def rss(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_reader_that_does_not_read_costs_no_memory_and_no_burst_follows() -> None:
    child = start(Settings(host=HostSettings(driver="none"), probes={"host": 0.02, "pci": 0.02}))
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        select.select([child.stdout], [], [], 20)
        os.read(child.stdout.fileno(), 1 << 16)
        before = rss(child.pid)
        time.sleep(2.5)  # far more than a pipe holds
        assert rss(child.pid) < before + (4 << 20)
        frames, seen = Frames(), []
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            ready, _, _ = select.select([child.stdout], [], [], 0.1)
            if ready:
                seen += list(frames.feed(os.read(child.stdout.fileno(), 1 << 16)))
        monos = [
            message.mono_us for message in seen if isinstance(message, Sweep) and message.probe == "host"
        ]
        late = [mono for mono in monos if mono > monos[-1] - 500_000]
        assert len(late) <= 30  # 25 fit into half a second at 0.02 s
        child.stdin.close()
        assert child.wait(90) == 0
    finally:
        child.kill()
        child.wait(90)
        child.stdout.close()


@pytest.mark.parametrize("module", ["gpufleet_agent.sampler", "gpufleet_agent.bench"])
def test_G04_children_never_load_grpc(module: str) -> None:
    heavy = ("grpc", "google", "apscheduler", "asyncio")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_G04_nothing_forks(path: Path) -> None:
    banned = {
        "fork",
        "forkpty",
        "multiprocessing",
        "ProcessPoolExecutor",
        "set_start_method",
        "preexec_fn",
        "posix_spawn",
    }
    for node in ast.walk(ast.parse(path.read_text())):
        names: set[str | None] = set()
        if isinstance(node, ast.Import):
            names = {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            names = {node.attr}
        elif isinstance(node, ast.Name):
            names = {node.id}
        elif isinstance(node, ast.keyword):
            names = {node.arg}
        assert not names & banned, f"{path}:{getattr(node, 'lineno', 0)}"


SCENARIO = b'[fleet]\nnodes = "a"\ngpus = 4\n[[fault]]\nnode = "a"\ngpu = 2\nkind = "card_lost"\nat = 0\n'


def test_B01_a_lost_card_is_a_row_among_full_ones() -> None:
    host = GuardedHost(parse(SCENARIO).host("a", lambda: 5.0, 0))
    sweep = probe.run_probe("gpu", cast(Any, gpu), host, print)
    names = [metric.name for metric in gpu.METRICS]
    rows = [dict(zip(names, row, strict=True)) for row in sweep.rows]
    assert [row["state"] for row in rows] == ["ok", "ok", "lost", "ok"]
    assert [row["temperature_c"] is None for row in rows] == [False, False, True, False]
    assert rows[2]["gpu_uuid"] is not None
    assert sweep.error == ""
    found = sampler.read_inventory(host)
    assert not found.complete
    assert sum(item.entity.startswith("gpu:") for item in found.items) == 3


def test_labels_of_the_host_are_in_its_inventory() -> None:
    host = GuardedHost(parse(SCENARIO).host("a", lambda: 5.0, 0), labels={"rack": "r12"})
    found = sampler.read_inventory(host).items[0].attributes
    assert (found["label.rack"], found["hostname"]) == ("r12", "a")


def test_a_skipped_card_answers_hung_without_being_asked() -> None:
    host = GuardedHost(parse(SCENARIO).host("a", lambda: 5.0, 0), [Skip(_pci(1), "GPU-known", 1)])
    sweep = probe.run_probe("gpu", cast(Any, gpu), host, print)
    names = [metric.name for metric in gpu.METRICS]
    rows = [dict(zip(names, row, strict=True)) for row in sweep.rows]
    assert [row["state"] for row in rows] == ["ok", "hung", "lost", "ok"]
    assert rows[1]["gpu_uuid"] == "GPU-known"
    assert not host.whole


def test_B05_a_driver_that_is_skipped_is_an_error_of_the_sweep_and_not_zero_cards() -> None:
    host = GuardedHost(parse(SCENARIO).host("a", lambda: 5.0, 0), [Skip("")])
    sweep = probe.run_probe("gpu", cast(Any, gpu), host, print)
    assert (sweep.error, sweep.rows) == ("hung", [])
    assert not sampler.read_inventory(host).complete


def _pci(index: int) -> str:
    return parse(SCENARIO).host("a", lambda: 0.0, 0).gpus()[index].pci


class Broken(SysfsHost):
    """A host of which one part raises, whatever it raises."""

    def __init__(self, root: Path, part: str, error: Exception) -> None:
        super().__init__(root)
        self._part, self._error = part, error

    def node(self) -> Item:
        self._fail("node")
        return super().node()

    def pci_devices(self) -> Iterable[Mapping[str, Value | Null]]:
        self._fail("pci_devices")
        return super().pci_devices()

    def rows(self, group: str) -> Iterable[Mapping[str, Value | Null]]:
        self._fail(group)
        return super().rows(group)

    def _fail(self, part: str) -> None:
        if part == self._part:
            raise self._error


@pytest.mark.parametrize("error", [DriverError("no_sysfs", "x"), OSError("x"), KeyError("x")])
@pytest.mark.parametrize("part", ["node", "pci_devices", "port", "dimm_item", "disk_item", "mount_item"])
def test_a_part_of_the_host_that_cannot_be_read_costs_the_inventory_nothing_else(
    tree: Any, part: str, error: Exception
) -> None:
    root = tree("hgx-h100")
    whole = {item.entity for item in sampler.read_inventory(GuardedHost(SysfsHost(root))).items}
    said: list[str] = []
    found = sampler.read_inventory(GuardedHost(Broken(root, part, error)), complain=said.append)
    kind = {"pci_devices": "pci", "node": "node"}.get(part, part.removesuffix("_item"))
    assert not found.complete
    entities = {item.entity for item in found.items}
    assert entities == {entity for entity in whole if not entity.startswith(f"{kind}:")}
    assert len(said) == (0 if isinstance(error, DriverError) else 1)
