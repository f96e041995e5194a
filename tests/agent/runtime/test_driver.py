"""What a driver does to a whole host, in real processes: one event, the right rows, no gap for others."""

import json
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpufleet_agent.control import ControlError, ask, seconds

pytestmark = pytest.mark.slow  # each is an agent that goes through a fault in real time

QUIET = {"agent_start", "agent_stop", "xid"}


def fault(kind: str, at: float, until: float | None = None, gpu: object = None, params: str = "") -> str:
    text = f'[[fault]]\nnode = "gpu-a01"\nkind = "{kind}"\nat = {at}\n'
    text += "" if until is None else f"until = {until}\n"
    text += "" if gpu is None else f"gpu = {json.dumps(gpu)}\n"
    return text + (f"params = {{ {params} }}\n" if params else "")


AT_S = 7.0
"""When a fault begins: well after an agent has read its cards once, also on a busy machine."""


def events(kit: Any) -> list[tuple[str, str]]:
    return [(event.kind, event.code) for event in kit.spool.events() if event.kind not in QUIET]


def errors(kit: Any) -> list[str]:
    """Errors of the gpu probe, in order, without repetitions."""
    found = [str(row["error"]) for row in kit.spool.rows("agent") if row["probe"] == "gpu"]
    return [one for at, one in enumerate(found) if at == 0 or found[at - 1] != one]


def sweeps(kit: Any) -> list[dict[str, str]]:
    """State by address of every gpu sweep, in order."""
    found: dict[int, dict[str, str]] = {}
    for row in kit.spool.rows("gpu"):
        found.setdefault(row["ts_us"], {})[row["pci"]] = row["state"]
    return [found[ts] for ts in sorted(found)]


def longest_gap_s(kit: Any, probe: str, pci: str = "") -> float:
    """Between two rows of a probe; of one card that answers, where one is named."""
    rows = kit.spool.rows(probe)
    if pci:
        rows = [row for row in rows if row["pci"] == pci and row["state"] == "ok"]
    times = sorted({int(row["ts_us"]) for row in rows})
    return max(after - before for before, after in pairwise(times)) / 1e6


@pytest.mark.parametrize("code", ["gpu_is_lost", "reset_required"])
def test_B01_a_loss_is_one_event_and_costs_the_others_nothing(kit: Any, code: str) -> None:
    agent = kit.start(kit.config(faults=fault("card_lost", AT_S, gpu=3, params=f'code = "{code}"')))
    kit.wait_for(lambda: [list(one.values()).count("lost") for one in sweeps(kit)].count(1) >= 4)
    assert agent.end() == 0
    assert [kind for kind, _ in events(kit)] == ["gpu_lost"]
    newest = sweeps(kit)[-1]
    assert sorted(newest.values()) == ["lost", *["ok"] * 7]
    others = [pci for pci, state in newest.items() if state == "ok"]
    for pci in others:
        assert len([one for one in sweeps(kit) if one.get(pci) == "ok"]) == len(sweeps(kit))


# Long enough that starting a process on a loaded machine is a small part of it; the bound is as it is.
EVERY_S, DEADLINE_S = 3.0, 1.0
SLOW = f"[sampler]\ndeadline_s = {DEADLINE_S}\ninit_deadline_s = 5.0\nretry_s = 60.0\n"


def bounded(kit: Any, cards: Iterable[str], every_s: float = EVERY_S) -> None:
    """Nobody who was not hit waited longer than a call's deadline and two intervals."""
    assert longest_gap_s(kit, "host") <= DEADLINE_S + 2 * every_s
    assert longest_gap_s(kit, "pci") <= DEADLINE_S + 2 * (2 * every_s)  # its own interval is twice as long
    for pci in cards:
        assert longest_gap_s(kit, "gpu", pci) <= DEADLINE_S + 2 * every_s


def others(kit: Any) -> list[str]:
    """Cards that answered in every sweep that there was."""
    seen = sweeps(kit)
    return [pci for pci in seen[0] if all(one.get(pci) == "ok" for one in seen)]


def test_B07_a_hang_in_the_middle_costs_the_others_a_deadline_and_two_intervals_at_most(kit: Any) -> None:
    agent = kit.start(kit.config(tables=SLOW, faults=kit.hang(gpu=5, at=AT_S), every_s=EVERY_S))
    kit.wait_for(lambda: [list(one.values()).count("hung") for one in sweeps(kit)].count(1) >= 2)
    assert agent.end() == 0
    assert [kind for kind, _ in events(kit)] == ["driver_hung"]
    assert sorted(sweeps(kit)[-1].values()) == ["hung", *["ok"] * 7]
    assert len(others(kit)) == 7
    bounded(kit, others(kit))


def test_a_crash_in_the_middle_costs_every_card_as_little(kit: Any) -> None:
    agent = kit.start(kit.config(tables=SLOW, every_s=EVERY_S))
    kit.wait_for(lambda: len(sweeps(kit)) >= 2)
    sampler = agent.child()
    sampler.send_signal(signal.SIGSEGV)
    seen = len(sweeps(kit))
    kit.wait_for(lambda: len(sweeps(kit)) >= seen + 2)
    assert agent.end() == 0
    ((kind, code),) = events(kit)
    assert (kind, code) == ("sampler_restarted", "signal_11") or kind == "driver_crashed"
    assert len(others(kit)) == 8
    bounded(kit, others(kit))


@pytest.mark.parametrize(
    ("faults", "told", "states", "untouched"),
    [
        (fault("card_lost", AT_S, gpu=3), ["gpu_lost"], ["lost", *["ok"] * 7], 7),
        (fault("card_lost", AT_S, gpu="*"), ["gpu_lost"] * 8, ["lost"] * 8, 0),
        (fault("card_absent", AT_S, gpu="*", params='where = "driver"'), ["gpu_lost"] * 8, [], 8),
        (fault("card_absent", 0.0, gpu=6, params='where = "driver"'), [], ["ok"] * 7, 7),
        (fault("board_swap", AT_S, gpu=1), ["driver_reloaded", "gpu_found", "gpu_lost"], ["ok"] * 8, 8),
        (fault("driver_not_loaded", AT_S, AT_S + 0.8), ["driver_reloaded"], ["ok"] * 8, 8),
        (
            fault("driver_not_loaded", AT_S, params='code = "driver_mismatch"'),
            ["driver_mismatch"],
            ["ok"] * 8,
            8,
        ),
    ],
    ids=["loss", "all-lost", "none-listed", "seven-of-eight", "swap", "reload", "mismatch"],
)
def test_what_is_told_which_rows_there_are_and_that_nobody_else_waits(
    kit: Any, faults: str, told: list[str], states: list[str], untouched: int
) -> None:
    agent = kit.start(kit.config(tables=SLOW, faults=faults, every_s=1.0))
    kit.wait_for(lambda: len(kit.spool.rows("host")) >= 6 and len(events(kit)) >= len(told))
    assert agent.end() == 0
    assert sorted(kind for kind, _ in events(kit)) == told
    newest = sweeps(kit)[-1]  # the last that gave rows
    assert sorted(newest.values()) == (states or ["ok"] * 8)
    runs = [row for row in kit.spool.rows("agent") if row["probe"] == "gpu"]
    assert runs[-1]["rows"] == (0 if told == ["driver_mismatch"] else len(states))
    assert len(others(kit)) == untouched
    bounded(kit, others(kit), 1.0)


def test_B05_seven_of_eight_at_boot_and_none_without_a_driver(kit: Any) -> None:
    faults = fault("card_absent", 0.0, gpu=6, params='where = "driver"') + fault(
        "driver_not_loaded", AT_S, AT_S + 3.0
    )
    agent = kit.start(kit.config(faults=faults))
    kit.wait_for(lambda: len(errors(kit)) == 3 and len(sweeps(kit)) > 6)
    assert agent.end() == 0
    assert errors(kit) == ["", "driver_not_loaded", ""]
    assert {len(one) for one in sweeps(kit)} == {7}
    assert {row["pci"] for row in kit.spool.rows("pci")} >= set(sweeps(kit)[0])
    assert len({row["pci"] for row in kit.spool.rows("pci")}) == 8
    assert events(kit) == [("driver_reloaded", "")]  # once, at its end; and no card was lost by it


def test_all_cards_gone_with_the_driver_loaded_is_not_a_host_without_cards(kit: Any) -> None:
    agent = kit.start(kit.config(faults=fault("card_lost", AT_S, gpu="*"), gpus=4))
    kit.wait_for(lambda: [set(one.values()) for one in sweeps(kit)].count({"lost"}) >= 2)
    assert agent.end() == 0
    assert [kind for kind, _ in events(kit)] == ["gpu_lost"] * 4
    assert len({event.entity for event in kit.spool.events("gpu_lost")}) == 4
    assert errors(kit) == [""]
    assert all(len(one) == 4 for one in sweeps(kit))


def test_B03_a_swapped_board_is_another_card_and_the_old_one_is_lost(kit: Any) -> None:
    agent = kit.start(kit.config(faults=fault("board_swap", AT_S, gpu=1), gpus=2))
    kit.wait_for(lambda: len({row["gpu_uuid"] for row in kit.spool.rows("gpu")}) == 3)
    kit.wait_for(lambda: len(events(kit)) >= 3)
    assert agent.end() == 0
    assert sorted(kind for kind, _ in events(kit)) == ["driver_reloaded", "gpu_found", "gpu_lost"]
    (lost,) = kit.spool.events("gpu_lost")
    (found,) = kit.spool.events("gpu_found")
    assert lost.entity != found.entity
    assert json.loads(lost.detail)["pci"] == json.loads(found.detail)["pci"]


def test_B09_a_library_that_does_not_fit_is_told_once_after_a_new_process_did_not_help(kit: Any) -> None:
    faults = fault("driver_not_loaded", AT_S, AT_S + 8.0, params='code = "driver_mismatch"')
    agent = kit.start(kit.config(faults=faults))
    first = agent.child()
    kit.wait_for(lambda: kit.spool.events("driver_mismatch"))
    assert first.pid not in [child.pid for child in agent.children()]
    kit.wait_for(lambda: kit.spool.events("driver_recovered"))
    assert agent.end() == 0
    assert errors(kit) == ["", "driver_mismatch", ""]
    kinds = [kind for kind, _ in events(kit)]
    assert kinds.count("driver_mismatch") == kinds.count("driver_recovered") == 1
    assert set(kinds) <= {"driver_mismatch", "driver_recovered", "driver_reloaded"}


def test_B09_an_agent_started_anew_in_a_mismatch_does_not_tell_it_again(kit: Any) -> None:
    config = kit.config(faults=fault("driver_not_loaded", 0.0, params='code = "driver_mismatch"'))
    for _ in range(2):
        agent = kit.start(config)
        kit.wait_for(lambda: kit.spool.events("driver_mismatch"))
        seen = len(kit.spool.rows("host"))
        kit.wait_for(lambda seen=seen: len(kit.spool.rows("host")) > seen + 6)
        assert agent.end() == 0
    assert len(kit.spool.events("driver_mismatch")) == 1


# ---------------------------------------------------------------- release and resume


def command(kit: Any, *words: str) -> subprocess.CompletedProcess[str]:
    config = kit.tmp / "agent.toml"
    return subprocess.run(
        [sys.executable, "-m", "gpufleet_agent.main", *words, "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_driver_is_given_back_on_request_while_the_rest_goes_on(kit: Any) -> None:
    config = kit.config(faults=fault("xid", 7.0, gpu=2))
    agent = kit.start(config)
    kit.wait_for(lambda: kit.spool.rows("gpu"))
    before = agent.child()
    path = kit.tmp / "run" / "agent.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    said = command(kit, "release", "--for", "1h")
    assert (said.returncode, said.stderr) == (0, "")
    assert not before.is_running() or before.status() == "zombie"  # gone before it says so
    kit.wait_for(lambda: errors(kit)[-1] == "released")
    kit.wait_for(lambda: kit.spool.events("xid"))  # the kernel log is read all the same
    rows, hosts = len(kit.spool.rows("gpu")), len(kit.spool.rows("host"))
    agent.process.kill()  # an upgrade of the agent in the middle of it
    agent.process.wait(90)
    agent = kit.start(config)
    kit.wait_for(lambda: len(kit.spool.rows("host")) > hosts + 3)
    assert len(kit.spool.rows("gpu")) == rows
    assert command(kit, "resume").returncode == 0
    kit.wait_for(lambda: len(kit.spool.rows("gpu")) > rows)
    assert agent.end() == 0
    assert not path.exists()
    assert errors(kit) == ["", "released", ""]
    assert events(kit) == [("driver_released", "asked"), ("driver_resumed", "asked")]


def test_it_takes_the_driver_back_by_itself(kit: Any) -> None:
    agent = kit.start(kit.config())
    kit.wait_for(lambda: kit.spool.rows("gpu"))
    assert command(kit, "release", "--for", "6s").returncode == 0
    kit.wait_for(lambda: kit.spool.events("driver_resumed"))
    kit.wait_for(lambda: errors(kit) == ["", "released", ""])
    assert agent.end() == 0
    assert events(kit) == [("driver_released", "asked"), ("driver_resumed", "time_over")]


def test_the_socket_takes_its_words_and_nothing_else(kit: Any) -> None:
    agent = kit.start(kit.config())
    kit.wait_for(lambda: kit.spool.rows("gpu"))
    path = kit.tmp / "run" / "agent.sock"
    assert ask(path, "status")["released"] is False
    for words in (
        "",
        "release",
        "release x",
        "release nan",
        "release -1",
        "release 1e9",
        "exec ls",
        "\x00\xff",
    ):
        answer = ask(path, words)
        assert answer["ok"] is False, words
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"x" * 100_000)  # longer than any word of ours: dropped
    assert ask(path, "status")["ok"] is True
    seen = len(kit.spool.rows("gpu"))
    kit.wait_for(lambda: len(kit.spool.rows("gpu")) > seen + 8)
    assert agent.end() == 0
    assert "Traceback" not in agent.errors()
    assert events(kit) == []


def test_without_an_agent_release_is_one_line(kit: Any) -> None:
    kit.config()
    for words in (("release",), ("resume",)):
        said = command(kit, *words)
        assert said.returncode == 1
        assert said.stderr.startswith("fleet-agent: ")
        assert said.stderr.count("\n") == 1
    assert command(kit, "release", "--for", "soon").returncode == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("90", 90),
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("0", None),
        ("25h", None),
        ("m", None),
        ("", None),
    ],
)
def test_times_as_people_type_them(text: str, wanted: float | None) -> None:
    assert seconds(text) == wanted


def test_nobody_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ControlError):
        ask(tmp_path / "agent.sock", "status")
