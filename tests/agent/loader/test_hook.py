"""The hook inside somebody else's training: what it counts, and that it never gets in the way."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpufleet_loader
from gpufleet.metric import Row
from gpufleet_agent.probe import check_row
from gpufleet_agent.probes.loader import METRICS

Share = Callable[[Row], float]


@pytest.mark.parametrize("wanted", [0.0, 0.05, 0.1, 0.3, 0.5])
def test_an_injected_share_of_waiting_is_recovered(
    trainer: Any, agent: Any, share: Share, wanted: float
) -> None:
    step = 0.2
    script = [2.0, *[wanted * step] * 400]
    assert trainer.run(trainer.hook.watch(trainer.loader(script)), (1 - wanted) * step) == 401
    row = agent.hears_all(trainer, 400)
    assert abs(share(row) - wanted) < 0.02
    assert row["startup_s_total"] == pytest.approx(2.0)
    assert sum(map(int, str(row["wait_hist"]).split(","))) == 400
    cells, _ = check_row(METRICS, row)
    assert len(cells) == len(METRICS)


@pytest.mark.parametrize(
    ("script", "busy_s", "wait_s", "longest_s"),
    [
        ([1.0, *[0.002] * 100], 0.1, 0.2, 0.002),  # steady
        ([1.0, *[0.4] * 50], 0.1, 20.0, 0.4),  # slow disk
        ([1.0, *[0.001, 0.001, 0.001, 2.0] * 20], 0.1, 40.06, 2.0),  # bursty
        ([1.0, *[0.01] * 30, 300.0, *[0.01] * 10], 0.1, 300.4, 300.0),  # a hang that ends
    ],
    ids=["steady", "slow-disk", "bursty", "hang"],
)
def test_what_is_waited_for_is_counted(
    trainer: Any, agent: Any, script: list[float], busy_s: float, wait_s: float, longest_s: float
) -> None:
    trainer.run(trainer.hook.watch(trainer.loader(script)), busy_s)
    steps = len(script) - 1
    row = agent.hears_all(trainer, steps)
    assert row["wait_s_total"] == pytest.approx(wait_s)
    assert row["busy_s_total"] == pytest.approx(busy_s * (steps + 1))
    assert row["wait_max_s"] == pytest.approx(longest_s)


def test_the_start_of_a_pass_and_a_checkpoint_are_no_waiting(trainer: Any, agent: Any, share: Share) -> None:
    for _ in range(3):
        loader = trainer.hook.watch(trainer.loader([20.0, *[0.001] * 50]))
        for at, _batch in enumerate(loader):
            trainer.clock.sleep(90.0 if at == 25 else 0.1)
    row = agent.hears_all(trainer, 150)
    assert row["startup_s_total"] == pytest.approx(60.0)
    assert row["pause_s_total"] == pytest.approx(270.0)
    assert share(row) < 0.02


def test_two_loaders_are_two_and_validation_says_so(trainer: Any, agent: Any) -> None:
    trainer.run(trainer.hook.watch(trainer.loader([1.0, *[0.01] * 20]), name="train"))
    trainer.run(trainer.hook.watch(trainer.loader([1.0, *[5.0] * 20]), name="val"))
    trainer.run(trainer.hook.watch(trainer.loader([1.0, *[5.0] * 3]), name="other", role="probe"))
    steps = {"train": 20, "val": 20, "other": 3}
    rows = agent.hears(
        lambda rows: {name: row["fetches_total"] for name, row in rows.items()} == steps, trainer
    )
    assert {name: row["role"] for name, row in rows.items()} == {
        "train": "train", "val": "eval", "other": "probe",
    }  # fmt: skip
    assert rows["train"]["wait_s_total"] == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["val", "Valid", "validation_2", "eval-set", "test", "dev", "predict"])
def test_names_of_evaluation(trainer: Any, name: str) -> None:
    trainer.hook.watch([1], name=name)
    assert trainer.hook._known[name].role == "eval"


@pytest.mark.parametrize("name", ["train", "pretrain", "testament", "device_feed", "values"])
def test_names_of_training(trainer: Any, name: str) -> None:
    trainer.hook.watch([1], name=name)
    assert trainer.hook._known[name].role == "train"


def test_exceptions_length_and_attributes_are_the_loaders_own(trainer: Any, socket_path: Path) -> None:
    trouble = ValueError("a broken file")
    inner = trainer.loader([0.1, 0.1, trouble, 0.1])
    loader = trainer.hook.watch(inner)
    assert len(loader) == 4
    assert loader.num_workers == 4
    assert bool(loader)
    loader.prefetch_factor = 7
    assert inner.prefetch_factor == 7
    batches = iter(loader)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ValueError, match="a broken file") as caught:
        next(batches)
    assert caught.value is trouble
    assert next(batches) == 4
    with pytest.raises(StopIteration):
        next(batches)
    assert batches.at == 4
    with pytest.raises(AttributeError):
        _ = loader.nothing_of_the_kind
    assert trainer.hook.failures == 0


def test_what_has_no_length_gets_none(trainer: Any) -> None:
    def stream() -> Iterator[int]:
        yield from range(3)

    loader = trainer.hook.watch(stream())
    assert not hasattr(loader, "__len__")
    assert bool(loader)
    assert next(loader) == 0
    assert list(loader) == [1, 2]
    assert list(trainer.hook.watch([4, 5])) == [4, 5]
    assert trainer.hook.watch([4, 5])[1] == 5


def test_the_other_two_ways_to_tell(trainer: Any, agent: Any) -> None:
    hook, clock = trainer.hook, trainer.clock
    for _ in range(11):
        with hook.fetch("train"):
            clock.sleep(0.2)
        clock.sleep(0.8)
    for _ in range(11):
        clock.sleep(1.0)
        hook.report_wait("lightning", 0.3)
    with pytest.raises(KeyError), hook.fetch("train"):
        raise KeyError
    steps = {"train": 10, "lightning": 10}
    rows = agent.hears(
        lambda rows: {name: row["fetches_total"] for name, row in rows.items()} == steps, trainer
    )
    assert rows["train"]["wait_s_total"] == pytest.approx(2.0)
    assert rows["train"]["busy_s_total"] == pytest.approx(8.0)
    assert rows["lightning"]["wait_s_total"] == pytest.approx(3.0)
    assert rows["lightning"]["busy_s_total"] == pytest.approx(7.0)


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, None, "1"])
def test_nonsense_is_not_counted_and_raises_nothing(trainer: Any, nonsense: Any) -> None:
    trainer.hook.report_wait("train", 0.1)
    trainer.hook.report_wait("train", nonsense)
    assert trainer.hook._known["train"].fetches == 0


def test_a_clock_that_is_set_changes_nothing(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpufleet_loader._clock is time.monotonic_ns
    for jump in (1e12, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        trainer.run(trainer.hook.watch(trainer.loader([1.0, *[0.1] * 10])))
    assert trainer.hook._known["train"].wait_ns == pytest.approx(2e9)


@pytest.mark.parametrize(
    ("set_", "told"),
    [
        ({"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "SLURM_PROCID": "0"}, (9, 1, 16)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NTASKS": "64"}, (3, 3, 64)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, (2, 0, None)),
        ({"RANK": "x", "WORLD_SIZE": "-1"}, (None, None, None)),
    ],
)
def test_ranks_come_from_the_launcher(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, set_: dict[str, str], told: tuple[int | None, ...]
) -> None:
    for name, text in set_.items():
        monkeypatch.setenv(name, text)
    trainer.hook.watch([1])
    message = json.loads(trainer.hook._known["train"].message())
    assert (message["rank"], message["local_rank"], message["world"]) == told


def test_without_an_agent_and_with_one_that_comes_later(trainer: Any, start_agent: Callable[[], Any]) -> None:
    loader = trainer.hook.watch(trainer.loader([1.0, *[0.1] * 500]))
    assert trainer.run(loader) == 501
    attempts = trainer.hook._known["train"].seq
    assert 1 < attempts <= 5, "after an error it waits 30 s"
    agent = start_agent()
    trainer.clock.sleep(40.0)
    trainer.run(loader)
    row = agent.hears_all(trainer, 1000)
    assert row["wait_s_total"] == pytest.approx(100.0)


def test_an_agent_that_is_restarted_misses_no_count(trainer: Any, start_agent: Callable[[], Any]) -> None:
    loader = trainer.hook.watch(trainer.loader([1.0, *[0.1] * 300]))
    first = start_agent()
    trainer.run(loader)
    first.hears(lambda rows: "train" in rows)
    first.loaders.close()
    trainer.run(loader)  # a minute without an agent
    second = start_agent()
    trainer.clock.sleep(40.0)
    trainer.run(loader)
    row = second.hears_all(trainer, 900)
    assert row["wait_s_total"] == pytest.approx(90.0)
    assert row["startup_s_total"] == pytest.approx(3.0)


AGENT = """
import sys, time
from pathlib import Path
from gpufleet_agent.loader import Loaders
loaders = Loaders(Path(sys.argv[1]))
loaders.open()
print("ready", flush=True)
for line in sys.stdin:
    rows = loaders.rows()
    columns = ("fetches_total", "wait_s_total", "messages_lost_total")
    print([[row[name] for name in columns] for row in rows], flush=True)
"""


def test_a_stopped_agent_blocks_nobody_and_loses_no_total(trainer: Any, socket_path: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(socket_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    try:
        assert agent.stdout.readline() == "ready\n"
        os.kill(agent.pid, signal.SIGSTOP)
        # the call returns before the last thread has stopped, which may still read for a while
        while any(" T " not in path.read_text() for path in Path(f"/proc/{agent.pid}/task").glob("*/stat")):
            time.sleep(0.01)
        sent, send = [], trainer.hook._send

        def counted(data: bytes) -> bool:
            sent.append(send(data))
            return bool(sent[-1])

        trainer.hook._send = counted
        trainer.hook.BACK_OFF_NS = trainer.hook.EVERY_NS = 1_000_000_000
        # a second of training per fetch: a message each, a thousand of them
        assert trainer.run(trainer.hook.watch(trainer.loader([1.0, *[0.25] * 1000])), 0.75) == 1001
        full = sent.count(False)
        assert len(sent) >= 1000
        assert full > 900, "the kernel queues a dozen, the rest were refused at once"
        os.kill(agent.pid, signal.SIGCONT)
        trainer.clock.sleep(2.0)
        deadline = time.monotonic() + 90
        while True:
            trainer.goodbye()
            time.sleep(0.01)
            agent.stdin.write("\n")
            agent.stdin.flush()
            rows = ast.literal_eval(agent.stdout.readline())
            if rows and rows[0][0] == 1000:
                break
            assert time.monotonic() < deadline, rows
        assert rows[0][1] == 250.0
        assert rows[0][2] >= full - 1
    finally:
        agent.kill()
        agent.communicate()


FORKS = """
import gpufleet_loader, os, sys
loader = gpufleet_loader.watch([0] * 21, name="train")
list(loader)
child = os.fork()
if child == 0:
    gpufleet_loader.EVERY_NS = 0
    if sys.argv[1] == "copy":
        list(loader)
    else:
        list(gpufleet_loader.watch([0] * 6, name="train"))
    gpufleet_loader._say_goodbye()
    sys.stdin.read()
    os._exit(0)
gpufleet_loader._say_goodbye()
print(os.getpid(), child, flush=True)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("how", ["copy", "own"])
def test_a_forked_child_is_heard_only_of_what_it_watches_itself(agent: Any, how: str) -> None:
    forking = subprocess.Popen(
        [sys.executable, "-c", FORKS, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert forking.stdout is not None
    parent, child = map(int, forking.stdout.readline().split())
    wanted = {parent: 20} | ({child: 5} if how == "own" else {})
    deadline = time.monotonic() + 90
    try:
        while {row["pid"]: row["fetches_total"] for row in agent.rows()} != wanted:
            assert time.monotonic() < deadline, agent.rows()
            time.sleep(0.01)
    finally:
        forking.communicate()
    assert forking.returncode == 0
    last = {row["pid"]: (row["fetches_total"], row["state"]) for row in agent.rows()}
    assert last == {pid: (count, "closed") for pid, count in wanted.items()}


def test_it_can_be_turned_off(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_LOADER_DISABLE", "1")
    batches = [1, 2]
    assert trainer.hook.watch(batches) is batches
    with trainer.hook.fetch("train"):
        pass
    trainer.hook.report_wait("train", 1.0)
    assert trainer.hook._known == {}


def test_a_failure_of_its_own_turns_it_off_and_is_counted(trainer: Any, agent: Any) -> None:
    loader = trainer.hook.watch(trainer.loader([0.1] * 50))

    def broken() -> None:
        raise RuntimeError

    trainer.hook._known["train"].message = broken
    assert trainer.run(loader) == 50
    assert trainer.hook.failures == 1
    assert agent.rows() == []


def test_a_descriptor_that_the_program_took_is_the_programs(trainer: Any, agent: Any) -> None:
    loader = trainer.hook.watch(trainer.loader([1.0, *[0.1] * 20]))
    trainer.run(loader)
    taken = trainer.hook._socket.fileno()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.dup2(ours.fileno(), taken)  # as after closing every descriptor and opening files of its own
        trainer.run(loader)
        agent.hears_all(trainer, 40)
        os.write(taken, b"the program's own")
        assert theirs.recv(1000) == b"the program's own"
        os.close(taken)


class TorchLike:
    """An iterator with a queue as PyTorch's has one."""

    def __init__(self, clock: Any, ready: list[int]) -> None:
        self.clock = clock
        self.ready = ready
        self._data_queue = types.SimpleNamespace(qsize=lambda: self.ready[0])

    def __iter__(self) -> "TorchLike":
        return self

    def __next__(self) -> int:
        if len(self.ready) == 1:
            raise StopIteration
        self.clock.sleep(0.00001 if self.ready.pop(0) else 0.5)
        return 1


def test_a_fetch_that_finds_nothing_ready_is_starved(trainer: Any) -> None:
    trainer.run(trainer.hook.watch(TorchLike(trainer.clock, [0, 3, 2, 0, 0, 1, 4])))
    counts = trainer.hook._known["train"]
    assert (counts.fetches, counts.starved, counts.ready) == (5, 2, 1)


def test_a_queue_that_does_not_say_is_not_asked_again(trainer: Any) -> None:
    batches = TorchLike(trainer.clock, [3, 2, 1, 4])

    def lost() -> int:
        raise NotImplementedError

    loader = iter(trainer.hook.watch(batches))
    batches._data_queue.qsize = lost
    loader._queue = lost
    assert next(loader) == 1
    assert loader._queue is None
    assert trainer.hook.failures == 0


def test_a_loader_read_by_a_second_thread_is_warned_of(
    trainer: Any, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = trainer.hook.watch(trainer.loader([1.0] * 3))
    trainer.run(loader, 2.0)
    thread = threading.Thread(target=trainer.run, args=(loader, 2.0))
    thread.start()
    thread.join()
    trainer.run(loader, 2.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_sixty_fifth_loader_is_let_alone(trainer: Any) -> None:
    for number in range(70):
        assert list(trainer.hook.watch([1, 2], name=f"loader-{number}")) == [1, 2]
    assert len(trainer.hook._known) == 64


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning", "transformers"])
def test_callbacks_of_frameworks(trainer: Any, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    class Base:
        def on_anything_else(self) -> str:
            return "base"

    for absent in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, absent, None)
    module: Any = types.ModuleType(package)
    module.Callback = module.TrainerCallback = Base
    monkeypatch.setitem(sys.modules, package, module)
    if package == "lightning.pytorch":
        monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    if package == "transformers":
        callback = trainer.hook.huggingface_callback()
        begin, end, other = "on_step_begin", "on_step_end", "on_evaluate"
    else:
        callback = trainer.hook.lightning_callback()
        begin, end, other = "on_train_batch_start", "on_train_batch_end", "on_validation_start"
    assert isinstance(callback, Base)
    assert callback.on_anything_else() == "base"
    for step in range(12):
        getattr(callback, begin)("args", state=1)
        trainer.clock.sleep(0.5)
        getattr(callback, end)("args", control=None)
        if step == 5:
            trainer.clock.sleep(30.0)
            getattr(callback, other)()
        trainer.clock.sleep(0.1)
    counts = trainer.hook._known["train"]
    # eleven fetches between twelve steps; one of them is not told apart from what came with it
    assert (counts.fetches, counts.wait_ns) == (10, pytest.approx(1.0e9))
    assert counts.busy_ns == pytest.approx(11 * 0.5e9)
    assert counts.pause_ns == pytest.approx(30.1e9)
    assert counts.startup_ns == 0


def test_it_is_one_file_for_python_3_8_of_the_standard_library_alone() -> None:
    source = Path(str(gpufleet_loader.__file__)).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    } | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_its_wheel_is_that_file_and_nothing_else(tmp_path: Path) -> None:
    home = Path(str(gpufleet_loader.__file__)).parent
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=home, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        about = next(name for name in packed.namelist() if name.endswith("METADATA"))
        text = packed.read(about).decode()
    assert names == {"gpufleet_loader/__init__.py", "gpufleet_loader/py.typed"}
    assert f"Version: {gpufleet_loader.__version__}\n" in text
    assert "Requires-Python: >=3.8\n" in text
    assert "License-Expression: Apache-2.0\n" in text
    assert "Requires-Dist" not in text


def test_a_process_that_ends_sends_what_it_has(agent: Any, socket_path: Path) -> None:
    code = "import gpufleet_loader\nfor batch in gpufleet_loader.watch(range(1000), name='short'): pass\n"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
    rows = agent.hears(lambda rows: "short" in rows)
    assert rows["short"]["fetches_total"] == 999
    assert rows["short"]["state"] == "closed"
