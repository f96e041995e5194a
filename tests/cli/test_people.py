"""What people do with incidents at the prompt: screens at 80 columns, one line for what cannot be done."""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

from gpufleet_cli import person, render
from gpufleet_cli.errors import FleetError

Run = Callable[..., Result]
GOLDEN = Path(__file__).parent / "golden"


class Seed(Protocol):
    def node(self, name: str, **more: object) -> None: ...

    def finding(self, *words: str, age: float = ..., incident: str = ...) -> int: ...

    def entity(self, node: str, index: int) -> str: ...


@pytest.fixture(autouse=True)
def ana(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ana")


def same(name: str, result: Result) -> None:
    """Compare with the golden file; GPUFLEET_GOLDEN=update writes it."""
    assert result.exit_code == 0, result.output
    path = GOLDEN / f"people_{name}.txt"
    if os.environ.get("GPUFLEET_GOLDEN") == "update":
        path.write_text(result.output, encoding="utf-8")
    assert result.output == path.read_text(encoding="utf-8")


def narrow(result: Result) -> None:
    assert max(map(len, result.output.split("\n"))) <= 80


def faults(seed: Seed) -> None:
    for number in (1, 2, 3):
        seed.node(f"gpu-{number:03}")
    seed.node("gpu-007", lost=[3])
    seed.node("gpu-008", seen_s=300)
    seed.finding(
        "gpu_missing", "gpu-007", seed.entity("gpu-007", 3), "crit", "lost_at_run_time",
        "no longer answers: 7 of 8 cards", incident="GPU missing", age=42,
    )  # fmt: skip
    seed.finding(
        "gpu_downclocked", "gpu-002", seed.entity("gpu-002", 5), "warn", "hw_thermal",
        "1103 of 1755 MHz over the last minute under load", incident="Card runs below its clock", age=1500,
    )  # fmt: skip
    seed.finding(
        "agent_silent", "gpu-008", "node:", "warn", "silent", "nothing heard for 300 s",
        incident="Agent silent", age=210,
    )  # fmt: skip


def known(seed: Seed, run: Run) -> None:
    """One acknowledged, one silenced, a node in maintenance; the third fault began before that."""
    faults(seed)
    for words in (
        ("ack", "INC-1", "--note", "reseating it", "--for", "8h"),
        ("silence", "rule=gpu_downclocked", "node=gpu-[001-003]", "--for", "7d", "--reason", "fans on order"),
        ("note", "3", "rack 4 has no network"),
    ):
        assert run("incidents", *words).exit_code == 0
    done = run("maintenance", "start", "gpu-[001-002]", "gpu-008", "--for", "2h", "--reason", "new firmware")
    assert done.exit_code == 0


def counters(run: Run) -> tuple[object, object]:
    document = json.loads(run("status", "-o", "json").output)
    return document["gpus"], document["nodes"]


def test_status_counts_what_people_know_of_and_hides_none(seed: Seed, run: Run) -> None:
    faults(seed)
    before = counters(run)
    codes = [run("status", "--exit-code").exit_code]
    for words in (("ack", "1"), ("silence", "node=gpu-002", "--for", "1h", "--reason", "x")):
        run("incidents", *words)
    run("maintenance", "start", "gpu-001", "--for", "2h", "--reason", "new firmware")
    assert counters(run) == before
    codes.append(run("status", "--exit-code").exit_code)
    assert codes == [11, 11]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("status", ("status",)),
        ("list", ("incidents",)),
        ("show", ("incidents", "show", "1")),
        ("silences", ("incidents", "silence")),
        ("maintenance", ("maintenance",)),
        ("report", ("incidents", "report", "--since", "1h")),
        ("report_md", ("incidents", "report", "--since", "12h", "-o", "md")),
    ],
)
def test_golden(seed: Seed, run: Run, name: str, words: tuple[str, ...]) -> None:
    known(seed, run)
    result = run(*words)
    same(name, result)
    if "md" not in words:
        narrow(result)


def test_closing_says_what_comes_back(seed: Seed, run: Run) -> None:
    faults(seed)
    result = run("incidents", "close", "1", "INC-2", "--reason", "both swapped")
    same("close", result)
    narrow(result)
    again = run("incidents", "ack", "1")
    assert (again.exit_code, again.stdout) == (6, "")
    assert again.stderr == "fleet: INC-1 is resolved: there is nothing to ack\n"


def test_acknowledge_and_take_it_back(seed: Seed, run: Run) -> None:
    faults(seed)
    (item,) = json.loads(run("incidents", "ack", "1", "-o", "json").output)["items"]
    assert item["flags"] == ["acknowledged"]
    assert item["acknowledged"] == {
        "by": "ana", "claimed": True, "at": "2026-11-30T12:00:00Z", "until": None, "note": "",
    }  # fmt: skip
    (item,) = json.loads(run("incidents", "unack", "1", "-o", "json").output)["items"]
    assert (item["flags"], item["acknowledged"]) == ([], None)
    assert run("incidents", "unack", "1").exit_code == 6


def test_silences_and_windows_end(seed: Seed, run: Run) -> None:
    known(seed, run)
    assert "over" in run("incidents", "silence", "--end", "1").output
    assert run("incidents", "silence").output == "no silences\n"
    assert run("incidents", "silence", "--end", "1").exit_code == 6
    assert "over" in run("maintenance", "end", "1").output
    assert run("maintenance", "list").output == "no maintenance windows\n"
    assert run("maintenance", "end", "1").exit_code == 6
    run("maintenance", "start", "gpu-001", "--from", "2026-12-01T08:00", "--for", "1h", "--reason", "x")
    (item,) = json.loads(run("maintenance", "-o", "json").output)["items"]
    assert (item["state"], item["from_at"], item["left_s"]) == ("coming", "2026-12-01T08:00:00Z", 3600)


@pytest.mark.parametrize(
    ("code", "part", "words"),
    [
        (2, "'x' is no incident", ("incidents", "ack", "x")),
        (2, "'soon' is no duration", ("incidents", "ack", "1", "--for", "soon")),
        (2, "30 days", ("incidents", "ack", "1", "--for", "31d")),
        (5, "no incident INC-9", ("incidents", "ack", "1", "9")),
        (5, "no incident INC-9", ("incidents", "note", "9", "x")),
        (2, "a note needs a text", ("incidents", "note", "1", " ")),
        (2, "closing needs a reason", ("incidents", "close", "1", "--reason", "\n")),
        (2, "'gpu-001' is no matcher", ("incidents", "silence", "gpu-001", "--for", "1h", "--reason", "x")),
        (2, "'slot=3' is no matcher", ("incidents", "silence", "slot=3", "--for", "1h", "--reason", "x")),
        (2, "is no host list", ("incidents", "silence", "node=gpu-[3-1]", "--for", "1h", "--reason", "x")),
        (2, "7 days", ("incidents", "silence", "node=gpu-001", "--for", "8d", "--reason", "x")),
        (5, "no such node: gpu-4", ("incidents", "silence", "node=gpu-4", "--for", "1h", "--reason", "x")),
        (5, "no rule 'xyd'", ("incidents", "silence", "rule=xyd", "--for", "1h", "--reason", "x")),
        (5, "has the serial '1'", ("incidents", "silence", "serial=1", "--for", "1h", "--reason", "x")),
        (2, "'a' is no silence", ("incidents", "silence", "--end", "a")),
        (5, "no silence 4", ("incidents", "silence", "--end", "4")),
        (5, "no such node: gpu-004", ("maintenance", "start", "gpu-004", "--for", "1h", "--reason", "x")),
        (2, "30 days", ("maintenance", "start", "gpu-001", "--for", "31d", "--reason", "x")),
        (2, "is no time", ("maintenance", "start", "x", "--from", "noon", "--for", "1h", "--reason", "x")),
        (5, "no maintenance window 4", ("maintenance", "end", "4")),
        (2, "92 days", ("incidents", "report", "--since", "93d")),
    ],
)  # fmt: skip
def test_one_clear_line_and_the_code_of_the_table(
    seed: Seed, run: Run, code: int, part: str, words: tuple[str, ...]
) -> None:
    faults(seed)
    result = run(*words)
    assert (result.exit_code, result.stdout) == (code, "")
    first, *hints = result.stderr.splitlines()
    assert first.startswith("fleet: ")
    assert part in first
    assert len(hints) <= 1
    assert all(line.startswith("  ") for line in hints)
    error = json.loads(run(*words, "-o", "json").stdout)["error"]
    assert part in error["message"]


@pytest.mark.parametrize(
    "words",
    [
        ("incidents", "ack"),
        ("incidents", "close", "1"),
        ("incidents", "silence", "node=gpu-001"),
        ("incidents", "silence", "--for", "1h"),
        ("incidents", "silence", "node=gpu-001", "--end", "1"),
        ("maintenance", "start", "gpu-001", "--for", "1h"),
        ("maintenance", "start", "--for", "1h", "--reason", "x"),
    ],
    ids=" ".join,
)
def test_what_is_left_out_is_usage(run: Run, words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2


@pytest.mark.parametrize(
    ("word", "expected"), [("90s", 90), ("90m", 5400), ("4h", 14400), ("7d", 604800), ("1d12h", 129600)]
)
def test_durations(word: str, expected: float) -> None:
    assert person.seconds(word) == expected


@given(st.text(max_size=12))
def test_no_text_breaks_a_duration_or_a_time(word: str) -> None:
    for read in (person.seconds, person.moment):
        with suppress(FleetError):
            assert math.isfinite(read(word))


NAME = st.text("abcxyz0123456789-_./:", min_size=1, max_size=8)


@given(st.lists(NAME, min_size=1, max_size=4), st.lists(NAME, min_size=1, max_size=3))
def test_a_matcher_names_what_was_typed(rules: list[str], entities: list[str]) -> None:
    words = (f"rule={','.join(rules)}", *(f"entity={entity}" for entity in entities))
    assert person.matcher(words) == {"rules": rules, "entities": entities}


@pytest.mark.parametrize("words", [("node",), ("incidents",), ("sql", "select a from range(5) t(a)")])
def test_lists_are_markdown_tables(seed: Seed, run: Run, words: tuple[str, ...]) -> None:
    faults(seed)
    head, line, *rows = run(*words, "-o", "md").output.splitlines()
    assert set(line) == {"|", "-", " "}
    assert {text.replace("\\|", "").count("|") for text in (head, *rows)} == {line.count("|")}
    assert len(rows) == (3 if words == ("incidents",) else 5)


@given(st.text(max_size=40))
def test_markdown_stays_one_line_of_a_table(value: str) -> None:
    [_, _, line] = render.as_markdown(["a"], [[value]]).split("\n")[:3]
    bare = line.replace("\\\\", "").replace("\\|", "")
    assert bare.count("|") == 2
