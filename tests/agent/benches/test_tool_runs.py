"""Tools that misbehave: whatever they do, they are ended, with all that they started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.agent.benches.processes import alive

from gpufleet_agent import gate, tool
from gpufleet_agent.bench import Settings, run_bench
from gpufleet_agent.benches import METRICS, fio
from gpufleet_agent.gate import Preempted
from gpufleet_agent.guard import HostSettings

OUTPUTS = Path(__file__).parents[2] / "fixtures" / "bench_tools"
NAMES = [metric.name for metric in METRICS]

FAMILY = """
echo $$ >>"$PIDS"
sleep 1000 & echo $! >>"$PIDS"
setsid sh -c 'echo $$ >>"$0"; exec sleep 1000' "$PIDS" &
(setsid sh -c 'echo $$ >>"$0"; sleep 1000 & echo $! >>"$0"; trap "" TERM; wait' "$PIDS" &)
until [ "$(wc -l <"$PIDS")" -ge 5 ]; do sleep 0.05; done
echo ready >"$PIDS.ready"
"""
"""One child of its group, one with a session of its own, one whose parent is gone, and one of that one's."""


class Fake:
    """A folder with a tool that is a shell script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids = folder / "pids"

    def tool(self, script: str, name: str = "fio") -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\nPIDS={self.pids}\n{script}\n")
        path.chmod(0o755)
        return str(path)

    @property
    def ready(self) -> bool:
        return (self.folder / "pids.ready").exists()

    def started(self) -> list[int]:
        return [int(line) for line in self.pids.read_text().split()]

    def settings(self, command: list[str], bench: str = "fio", deadline_s: float = 300.0) -> Settings:
        return Settings(
            bench=bench, host=HostSettings(driver="none"), state_dir=str(self.folder),
            lock=str(self.folder / "lock"), force=True, command=command, deadline_s=deadline_s,
        )  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def none_left(fake: Fake) -> None:
    assert len(fake.started()) == 5
    until(lambda: not any(alive(pid) for pid in fake.started()))


def test_one_that_hangs_is_ended_at_its_deadline_with_all_it_started(fake: Fake) -> None:
    path = fake.tool('echo $$ >>"$PIDS"\nsetsid sleep 1000 & echo $! >>"$PIDS"\nsleep 1000')
    fake.pids.touch()
    with pytest.raises(tool.BadTool, match="had not ended by its deadline"):
        tool.run([path], 1.5)
    until(lambda: not any(alive(pid) for pid in fake.started()))


def test_one_that_must_make_way_is_ended_with_all_it_started(fake: Fake) -> None:
    path = fake.tool(f"trap '' TERM\n{FAMILY}\nwhile :; do sleep 1000; done")

    def check() -> None:
        if fake.ready:
            raise Preempted("a job came")

    with pytest.raises(Preempted):
        tool.run([path], 600.0, check)
    none_left(fake)


def test_one_that_ends_leaves_nothing_behind(fake: Fake) -> None:
    ran = tool.run([fake.tool(f"{FAMILY}\necho done\nexit 3")], 600.0)
    assert (ran.code, ran.out) == (3, "done\n")
    none_left(fake)


@pytest.mark.parametrize("where", ["", ">&2"])
def test_one_that_floods_is_ended_or_not_listened_to(fake: Fake, where: str) -> None:
    script = f"head -c 9000000 /dev/zero | tr '\\0' x {where}\necho last"
    path = fake.tool(script)
    if where:
        ran = tool.run([path], 600.0)
        assert (ran.code, ran.out, len(ran.err)) == (0, "last\n", 1 << 16)
    else:
        with pytest.raises(tool.BadTool, match="more than 4 MiB"):
            tool.run([path], 600.0)


def test_it_sees_only_the_environment_that_we_chose(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD_X", "NCCL_ALGO", "CUDA_VISIBLE_DEVICES", "SECRET", "LANG", "LC_NUMERIC"):
        monkeypatch.setenv(name, "1")
    ran = tool.run([fake.tool("env; pwd; ls -A; ulimit -c")], 600.0)
    lines = ran.out.splitlines()
    names = {line.partition("=")[0] for line in lines if "=" in line}
    shell = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert names - shell <= {
        "PATH",
        "LD_LIBRARY_PATH",
        "LC_ALL",
        "CUDA_DEVICE_ORDER",
        "NCCL_DEBUG",
        "HOME",
        "TMPDIR",
    }
    assert "LC_ALL=C" in lines
    folder = next(line.partition("=")[2] for line in lines if line.startswith("HOME="))
    assert lines[-2:] == [folder, "0"]
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("name", "mode", "text", "why"),
    [
        ("missing", 0, "", "no program"),
        ("plain", 0o644, "#!/bin/sh\n", "no program"),
        ("not_a_program", 0o755, "\x7fELF nonsense", "Exec format error"),
        ("no_interpreter", 0o755, "#!/none/such\n", "No such file"),
    ],
)
def test_one_that_cannot_run_is_unsupported(fake: Fake, name: str, mode: int, text: str, why: str) -> None:
    path = fake.folder / name
    if mode:
        path.write_text(text)
        path.chmod(mode)
    (row,) = rows(run_bench(fake.settings([str(path)])))
    assert (row["status"], row["value"]) == ("unsupported", None)
    assert why in row["reason"]


def rows(sweep: Any) -> list[dict[str, Any]]:
    return [dict(zip(NAMES, cells, strict=True)) for cells in sweep.rows]


def test_what_a_tool_prints_is_rows_with_its_version_and_command(fake: Fake) -> None:
    path = fake.tool(f"cat {OUTPUTS}/fio-3-mixed.out; echo a warning >&2")
    found = {}
    for command in ([path], [path, "--bs=4k"]):
        for row in rows(run_bench(fake.settings(command))):
            found[row["convention"], row["params_hash"]] = row
            assert (row["status"], row["reason"], row["unit"]) == ("ok", "", "GB/s")
            assert (row["bench"], row["version"], row["entity"]) == (
                "fio",
                f"{fio.VERSION}-fio-3.36",
                "node:",
            )
    assert [row["value"] for row in found.values()] == [2.0, 0.5, 2.0, 0.5]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("cat {good}; exit 1", "exit status 1"),
        ("cat {good}; kill -SEGV $$", "signal 11"),
        ("echo no such device >&2; exit 2", "exit status 2: no such device"),
        ("cat {good} {good}", "2 results"),
        ("true", "0 results"),
        ("head -c 300 {good}", "no whole JSON document"),
    ],
)
def test_a_run_that_went_wrong_has_no_value(fake: Fake, script: str, why: str) -> None:
    path = fake.tool(script.replace("{good}", f"{OUTPUTS}/fio-3-good.out"))
    for row in rows(run_bench(fake.settings([path]))):
        assert (row["status"], row["value"]) == ("failed", None)
        assert why in row["reason"]


def start(settings: Settings) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gpufleet_agent.bench", msgspec.json.encode(settings).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("how", ["SIGTERM", "its parent ends"])
def test_a_bench_process_that_ends_takes_its_tool_along(fake: Fake, how: str) -> None:
    path = fake.tool(f"trap '' TERM\n{FAMILY}\nwhile :; do sleep 1000; done")
    with start(fake.settings([path])) as process:
        try:
            until(lambda: fake.ready)
            if how == "SIGTERM":
                process.send_signal(signal.SIGTERM)
            else:
                assert process.stdin is not None
                process.stdin.close()
            process.wait(60)
            none_left(fake)
        finally:
            process.kill()


def test_a_bench_by_hand_that_is_told_to_stop_takes_its_tool_along(fake: Fake) -> None:
    path = fake.tool(f"trap '' TERM\n{FAMILY}\nwhile :; do sleep 1000; done")
    config = fake.folder / "agent.toml"
    config.write_text(
        f'driver = "none"\nstate_dir = "{fake.folder}"\nruntime_dir = "{fake.folder}"\n'
        f'[benches.fio]\ncommand = ["{path}"]\ndeadline_s = 300\n'
    )
    command = [sys.executable, "-m", "gpufleet_agent.main", "bench", "fio", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: fake.ready)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) != 0
            none_left(fake)
        finally:
            process.kill()


def test_a_tool_ends_with_a_bench_process_that_is_killed(fake: Fake) -> None:
    path = fake.tool('echo $$ >>"$PIDS"; echo r >"$PIDS.ready"; exec sleep 1000')
    with start(fake.settings([path])) as process:
        try:
            until(lambda: fake.ready)
        finally:
            process.kill()
    until(lambda: not any(alive(pid) for pid in fake.started()))
    assert fake.started()


def test_our_own_tool_is_nobody_who_came(fake: Fake) -> None:
    seen: list[bool] = []

    def check() -> None:
        if fake.ready and not seen:
            seen.extend(gate._ours(pid) for pid in fake.started())
            raise Preempted("seen")

    with pytest.raises(Preempted):
        tool.run([fake.tool(f"{FAMILY}\nsleep 1000")], 600.0, check)
    assert seen == [True] * 5
    assert gate._ours(os.getpid())
    assert not gate._ours(1)
    assert not gate._ours(1 << 30)


def test_other_children_are_left_alone(fake: Fake) -> None:
    other = subprocess.Popen(["sleep", "1000"])
    try:
        tool.run([fake.tool("sleep 1000 & true")], 600.0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
