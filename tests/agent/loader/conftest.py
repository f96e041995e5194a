"""Training on a clock that is moved by hand; the real hook, a real socket and the agent's real intake."""

import atexit
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

import gpufleet_loader
from gpufleet.metric import Cell, Null, Row
from gpufleet_agent import loader as intake
from gpufleet_agent.loader import Loaders

S = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 5 * S

    def __call__(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * S)

    def seconds(self) -> float:
        return self.ns / S


@dataclass
class SimLoader:
    """A loader whose fetches take the seconds of a script; an exception in it is raised."""

    clock: Clock
    script: Iterable[float | Exception]
    num_workers: int = 4
    prefetch_factor: int = 2
    extra: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(list(self.script))

    def __iter__(self) -> Iterator[int]:
        return SimBatches(self.clock, list(self.script))


class SimBatches:
    def __init__(self, clock: Clock, script: list[float | Exception]) -> None:
        self.clock = clock
        self.script = script
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.script):
            raise StopIteration
        what = self.script[self.at]
        self.at += 1
        if isinstance(what, Exception):
            raise what
        self.clock.sleep(what)
        return self.at


@dataclass
class Trainer:
    """A process that trains: this one, with a hook of its own and time that passes by hand."""

    hook: ModuleType
    clock: Clock

    def loader(self, script: Iterable[float | Exception]) -> SimLoader:
        return SimLoader(self.clock, script)

    def run(self, loader: Iterable[object], busy_s: float = 0.1) -> int:
        steps = 0
        for _ in loader:
            self.clock.sleep(busy_s)
            steps += 1
        return steps

    def goodbye(self) -> None:
        self.hook._say_goodbye()


def load_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpufleet_loader_fresh", str(gpufleet_loader.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "loader.sock"
    monkeypatch.setenv("GPUFLEET_LOADER_SOCK", str(path))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "GPUFLEET_LOADER_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.fixture
def trainer(socket_path: Path) -> Iterator[Trainer]:
    hook, clock = load_hook(), Clock()
    vars(hook)["_clock"] = clock
    yield Trainer(hook, clock)
    atexit.unregister(hook._say_goodbye)
    if hook._socket is not None:
        hook._socket.close()


@dataclass
class Agent:
    """The intake of a running agent."""

    path: Path
    loaders: Loaders

    def rows(self) -> list[Row]:
        return self.loaders.rows()

    def row(self, loader: str = "train") -> Row:
        return next(row for row in self.rows() if row["loader"] == loader)

    def hears(
        self,
        what: Callable[[Mapping[str, Row]], bool],
        trainer: Trainer | None = None,
        timeout_s: float = 90.0,
    ) -> Mapping[str, Row]:
        """The rows by loader, once they are as they should be: the thread behind the socket has its pace.

        Training that takes no time is too fast for the kernel's queue, so the last message of a `trainer` is
        said until it got through.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if trainer is not None:
                trainer.goodbye()
            rows = {str(row["loader"]): row for row in self.rows()}
            if what(rows):
                return rows
            assert time.monotonic() < deadline, rows
            time.sleep(0.01)

    def hears_all(self, trainer: Trainer, steps: int, loader: str = "train") -> Row:
        """The row that counts so many steps, and all that the hook counts."""
        counts = trainer.hook._known[loader]

        def whole(rows: Mapping[str, Row]) -> bool:
            row = rows.get(loader, {})
            return row.get("fetches_total") == steps and row.get("busy_s_total") == counts.busy_ns / 1e9

        return self.hears(whole, trainer)[loader]


@pytest.fixture
def start_agent(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Agent]]:
    # training that takes no time says in a moment what takes minutes
    monkeypatch.setattr(intake, "BURST", 1e9)
    started: list[Agent] = []

    def start() -> Agent:
        agent = Agent(socket_path, Loaders(socket_path))
        assert agent.loaders.open()
        started.append(agent)
        return agent

    yield start
    for agent in started:
        agent.loaders.close()


@pytest.fixture
def agent(start_agent: Callable[[], Agent]) -> Agent:
    return start_agent()


def number(cell: Cell) -> float:
    assert not isinstance(cell, str | Null)
    return float(cell)


@pytest.fixture
def share() -> Callable[[Row], float]:
    """Part of its time that a loader's process waited."""

    def of(row: Row) -> float:
        wait, busy = number(row["wait_s_total"]), number(row["busy_s_total"])
        return wait / (wait + busy)

    return of
