"""The programs that ask mounts: real processes that answer, are slow, get stuck, and are found again."""

import contextlib
import itertools
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpufleet.metric import Null, Reason
from gpufleet_agent.drivers import canary
from gpufleet_agent.drivers.canary import Answer, Key, StatCanaries, Usage
from gpufleet_agent.drivers.mounts import Mounts
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import mount

DEADLINE_S = 1.5
DATA, ROOT, HOME = Key(43, "/data"), Key(28, "/"), Key(44, "/home")

PROGRAM = """#!/bin/sh
# -f -c "gpufleet-canary ID %S ..." -- PATH
id=${3#gpufleet-canary }
id=${id%% *}
path=$5
here=$(dirname "$0")
echo $$ >> "$here/asked$id"
case "$(cat "$here/does$id" 2>/dev/null)" in
    block) read -r line < "$here/fifo$id" ;;
    stop) kill -STOP $$ ;;
    sleep) exec sleep 1000 ;;
    fail) echo "stat: cannot read file system information for '$path': Stale file handle" >&2; exit 1 ;;
    deny) echo "stat: cannot read file system information for '$path': Permission denied" >&2; exit 1 ;;
    noise) head -c 100000 /dev/zero; exit 0 ;;
    die) kill -9 $$ ;;
    slow) sleep 0.3 ;;
esac
echo "gpufleet-canary $id 4096 1000 400 300 50 20"
"""
WELL = Usage(4_096_000, 1_638_400, 1_228_800, 50, 20)


NUMBERS = itertools.count()


class Fake:
    """A program in the place of `stat`; `does(mount, what)` says what becomes of a question."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # a name of its own: by it a sampler knows canaries of an earlier one, which other tests' are not
        self.path = folder / f"stat-{os.getpid()}-{next(NUMBERS)}"
        self.path.write_text(PROGRAM)
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    def does(self, key: Key, what: str) -> None:
        (self.folder / f"does{key.id}").write_text(what)
        if what == "block" and not (self.folder / f"fifo{key.id}").exists():
            os.mkfifo(self.folder / f"fifo{key.id}")

    def asked(self, key: Key) -> list[int]:
        """Processes that asked that mount so far, oldest first."""
        path = self.folder / f"asked{key.id}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def alive(self, key: Key) -> list[int]:
        return [pid for pid in self.asked(key) if _state(pid) not in ("", "Z")]

    def finish(self, canaries: StatCanaries, *keys: Key) -> None:
        """End what is under way, and have it reaped: a test leaves nothing behind."""

        def idle() -> bool:
            for pid in (pid for key in keys for pid in self.alive(key)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            canaries.ask([])
            return not canaries._running

        until(idle)

    def recover(self, key: Key) -> None:
        self.does(key, "answer")
        (self.folder / f"fifo{key.id}").write_text("go\n")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    made = Fake(tmp_path)
    yield made
    for key in (DATA, ROOT, HOME):
        for pid in made.alive(key):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def canaries(fake: Fake) -> StatCanaries:
    return StatCanaries([str(fake.path)], wait_s=30.0, deadline_s=DEADLINE_S, kill_after_s=1000.0)


def test_all_answer(fake: Fake, canaries: StatCanaries) -> None:
    answers = canaries.ask([ROOT, DATA])
    assert {key: (one.state, one.usage) for key, one in answers.items()} == {
        ROOT: ("ok", WELL),
        DATA: ("ok", WELL),
    }
    assert all(one.seconds is not None and 0 < one.seconds < 5 and not one.hung_s for one in answers.values())
    assert not fake.alive(ROOT), "nothing is left behind"


def test_T08_one_mount_hangs_the_rest_is_on_time_one_process_is_stuck_and_recovery_has_its_duration(
    fake: Fake, canaries: StatCanaries
) -> None:
    fake.does(DATA, "block")
    began = time.monotonic()
    first = canaries.ask([DATA, ROOT])
    assert first[ROOT].state == "ok"
    assert first[DATA].state == "hung", "it waits no longer than what is hung"
    for _ in range(3):
        answers = canaries.ask([DATA, ROOT])
        assert (answers[ROOT].state, answers[ROOT].usage) == ("ok", WELL)
        assert (answers[DATA].state, answers[DATA].usage) == ("hung", None)
    assert answers[DATA].hung_s >= DEADLINE_S
    assert len(fake.asked(DATA)) == len(fake.alive(DATA)) == 1, "one is stuck, and no other is sent"
    fake.recover(DATA)
    until(lambda: not fake.alive(DATA))
    lasted = time.monotonic() - began
    after = canaries.ask([DATA, ROOT])
    assert (after[DATA].state, after[DATA].usage) == ("ok", WELL)
    assert DEADLINE_S <= after[DATA].hung_s <= lasted
    assert canaries.ask([DATA, ROOT])[DATA].hung_s == 0.0, "said once"
    assert not fake.alive(DATA)


def test_T08_the_probe_reports_every_mount_and_only_data_as_hung(
    fake: Fake, canaries: StatCanaries, tmp_path: Path
) -> None:
    home = tmp_path / "proc/self"
    home.mkdir(parents=True)
    (home / "mountinfo").write_text(
        "28 1 252:0 / / rw - ext4 /dev/vda rw\n43 28 0:41 / /data rw - nfs4 filer:/data rw,addr=10.0.0.1\n"
    )
    mounts = Mounts(tmp_path, canaries)
    host = SimpleNamespace(rows=lambda group: mounts.rows())
    fake.does(DATA, "block")
    place = {metric.name: at for at, metric in enumerate(mount.METRICS)}
    for _ in range(2):
        sweep = run_probe("mount", mount, host, pytest.fail)
        assert sweep.error == ""
        read = {row[place["mount"]]: row for row in sweep.rows}
        assert (read["/"][place["canary_state"]], read["/"][place["size_bytes"]]) == ("ok", WELL.size)
        assert (read["/data"][place["canary_state"]], read["/data"][place["size_bytes"]]) == ("hung", None)
    assert len(fake.asked(DATA)) == 1
    fake.recover(DATA)
    until(lambda: not fake.alive(DATA))
    sweep = run_probe("mount", mount, host, pytest.fail)
    hung_s = {row[place["mount"]]: row[place["hung_s"]] for row in sweep.rows}
    assert hung_s["/"] == 0.0
    assert isinstance(hung_s["/data"], float)
    assert hung_s["/data"] >= DEADLINE_S


def test_T08_two_hang_and_one_recovers(fake: Fake, canaries: StatCanaries) -> None:
    for key in (DATA, HOME):
        fake.does(key, "block")
    assert {key: one.state for key, one in canaries.ask([DATA, HOME, ROOT]).items()} == {
        DATA: "hung",
        HOME: "hung",
        ROOT: "ok",
    }
    fake.recover(HOME)
    until(lambda: not fake.alive(HOME))
    answers = canaries.ask([DATA, HOME, ROOT])
    assert {key: one.state for key, one in answers.items()} == {DATA: "hung", HOME: "ok", ROOT: "ok"}
    assert answers[HOME].hung_s >= DEADLINE_S
    assert len(fake.alive(DATA)) == len(fake.asked(DATA)) == 1
    assert canaries.ask([]) == {}
    assert canaries.ask([DATA])[DATA].state == "hung", "a look that saw no mounts changes nothing"
    without = canaries.ask([HOME, ROOT])  # unmounted at last
    assert set(without) == {HOME, ROOT}
    fake.recover(DATA)
    until(lambda: not fake.alive(DATA))
    assert canaries.ask([DATA])[DATA].hung_s == 0.0, "mounted anew: it was not this one that hung"


@pytest.mark.parametrize("how", ["stop", "sleep"])
def test_T08_a_process_that_can_be_killed_is_replaced_so_that_recovery_is_seen(fake: Fake, how: str) -> None:
    canaries = StatCanaries([str(fake.path)], wait_s=0.05, deadline_s=1.5, kill_after_s=1.75)
    fake.does(DATA, how)
    canaries.ask([DATA])
    until(lambda: len(fake.asked(DATA)) == 1)
    time.sleep(2.0)
    assert canaries.ask([DATA])[DATA].state == "hung"
    until(lambda: not fake.alive(DATA))
    fake.does(DATA, "answer")

    def answered() -> bool:
        answer = canaries.ask([DATA])[DATA]
        assert answer.state in ("hung", "ok")
        return answer.state == "ok" and answer.hung_s >= 2.0

    until(answered)
    fake.finish(canaries, DATA)


@pytest.mark.parametrize(("how", "code"), [("fail", "ESTALE"), ("deny", "EACCES"), ("noise", "unparsable")])
def test_a_failure_has_its_code_and_is_an_answer(
    fake: Fake, canaries: StatCanaries, how: str, code: str
) -> None:
    fake.does(DATA, how)
    answer = canaries.ask([DATA])[DATA]
    assert (answer.state, answer.code, answer.usage, answer.hung_s) == ("failed", code, None, 0.0)


def test_what_others_kill_says_nothing(fake: Fake, canaries: StatCanaries) -> None:
    fake.does(DATA, "die")
    for _ in range(2):
        answer = canaries.ask([DATA])[DATA]
        assert isinstance(answer.state, Null)
        assert answer.hung_s == 0.0


def test_a_late_answer_is_taken_at_the_next_look_with_the_time_it_took(fake: Fake) -> None:
    canaries = StatCanaries([str(fake.path)], wait_s=0.02, deadline_s=10.0)
    fake.does(DATA, "slow")
    assert canaries.ask([DATA])[DATA] == Answer("pending")
    until(lambda: len(fake.asked(DATA)) == 1 and not fake.alive(DATA))
    answer = canaries.ask([DATA])[DATA]
    assert (answer.state, answer.usage) == ("ok", WELL)
    assert answer.seconds is not None
    assert answer.seconds >= 0.3
    fake.finish(canaries, DATA)


LATER = """
import sys, time
from gpufleet_agent.drivers.canary import Key, StatCanaries
StatCanaries([sys.argv[1]], wait_s=0.01).ask([Key(43, "/data")])
"""


def test_T08_a_sampler_that_starts_anew_finds_the_stuck_one_and_sends_no_other(
    fake: Fake, canaries: StatCanaries
) -> None:
    fake.does(DATA, "block")
    subprocess.run([sys.executable, "-c", LATER, str(fake.path)], check=True)
    until(lambda: len(fake.alive(DATA)) == 1)
    answers = canaries.ask([DATA, ROOT])
    assert answers[ROOT].state == "ok"
    assert answers[DATA].state == "hung"
    assert answers[DATA].hung_s >= DEADLINE_S
    assert len(fake.asked(DATA)) == 1
    fake.recover(DATA)
    until(lambda: not fake.alive(DATA))
    answer = canaries.ask([DATA])[DATA]
    assert (answer.state, answer.usage) == ("ok", WELL), "what the old one said nobody heard: a new one asks"
    assert answer.hung_s >= DEADLINE_S
    assert len(fake.asked(DATA)) == 2


def test_another_mount_at_the_same_path_is_asked_while_the_old_one_is_stuck(fake: Fake) -> None:
    canaries = StatCanaries([str(fake.path)], wait_s=0.3, deadline_s=0.1, kill_after_s=1000.0)
    fake.does(DATA, "block")
    canaries.ask([DATA])
    assert canaries.ask([DATA])[DATA].state == "hung"
    anew = Key(HOME.id, "/data")  # umount -l, and mounted again
    until(lambda: canaries.ask([anew])[anew].state == "ok")
    assert len(fake.alive(DATA)) == 1
    fake.recover(DATA)
    until(lambda: not fake.alive(DATA))
    canaries.ask([anew])
    assert not (Path("/proc") / str(fake.asked(DATA)[0])).exists(), "it was reaped"


def test_no_more_than_so_many_at_a_time_and_everybody_has_a_turn(fake: Fake) -> None:
    canaries = StatCanaries([str(fake.path)], wait_s=30.0, deadline_s=30.0, most=4, per_look=2)
    keys = [Key(number, f"/m{number}") for number in range(100, 105)]
    states = [canaries.ask(keys) for _ in range(3)]
    assert [sum(one.state == "ok" for one in answers.values()) for answers in states] == [2, 2, 2]
    asked = {key for answers in states for key, one in answers.items() if one.state == "ok"}
    assert asked == set(keys)
    assert {one.state for one in states[0].values()} == {"ok", Null(Reason.NOT_READ, "next_time")}
    assert [len(fake.asked(key)) for key in keys] == [2, 1, 1, 1, 1]


def test_stuck_ones_count_and_the_limit_holds(fake: Fake) -> None:
    canaries = StatCanaries([str(fake.path)], wait_s=0.05, deadline_s=0.02, most=2, kill_after_s=1000.0)
    for key in (DATA, HOME):
        fake.does(key, "block")
    for _ in range(3):
        answers = canaries.ask([DATA, HOME, ROOT])
    assert answers[ROOT].state == Null(Reason.NOT_READ, "next_time")
    until(lambda: len(fake.alive(DATA)) + len(fake.alive(HOME)) == 2)
    fake.finish(canaries, DATA, HOME)


def test_a_host_without_stat_and_one_that_cannot_start_it(tmp_path: Path) -> None:
    assert StatCanaries([]).ask([ROOT])[ROOT].state == Null(Reason.NOT_SUPPORTED, "no_stat")
    gone = StatCanaries([str(tmp_path / "gone")])
    assert gone.ask([ROOT])[ROOT] == Answer(Null(Reason.NOT_SUPPORTED, "ENOENT"))
    assert gone.ask([Key(1, "/a\0b")])[Key(1, "/a\0b")].state == Null(Reason.FAILED, "EINVAL")


def test_the_real_program_says_what_statvfs_says(tmp_path: Path) -> None:
    key, odd, gone = Key(1, str(tmp_path)), Key(2, str(tmp_path / "a b\n'x")), Key(3, str(tmp_path / "gone"))
    Path(odd.path).mkdir()
    answers = StatCanaries(wait_s=30.0, deadline_s=30.0).ask([key, odd, gone])
    said = os.statvfs(tmp_path)
    usage = answers[key].usage
    assert usage is not None
    assert (usage.size, usage.inodes) == (said.f_frsize * said.f_blocks, said.f_files)
    assert answers[odd].state == "ok"
    assert (answers[gone].state, answers[gone].code) == ("failed", "ENOENT")


def test_processes_of_others_and_nonsense_are_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "12/comm").write_text("stat\n")
    (tmp_path / "12/cmdline").write_bytes(b"stat\0-f\0-c\0gpufleet-canary 43 x\0--\0/data\0")
    (tmp_path / "12/stat").write_text("nonsense")
    me = tmp_path / str(os.getpid())
    me.mkdir()
    (me / "comm").write_text("stat\n")
    (me / "cmdline").write_bytes(b"stat\0-f\0-c\0another program 43\0--\0/data\0")
    (me / "stat").write_text(f"{os.getpid()} (stat) D " + "0 " * 40)
    assert (
        StatCanaries(["/bin/stat"], proc=tmp_path, wait_s=30.0, deadline_s=30.0).ask([ROOT])[ROOT].state
        == "ok"
    )


def test_the_mark_is_in_the_arguments() -> None:
    assert canary.MARK == "gpufleet-canary", "the fake program of these tests takes it apart"
