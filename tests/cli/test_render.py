"""Hostlists, ages and tables."""

import re

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet import hostlist
from gpufleet_cli import render
from gpufleet_cli.errors import FleetError
from gpufleet_cli.person import expand
from gpufleet_cli.render import Column


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["gpu-001"], "gpu-001"),
        (["gpu-001", "gpu-002", "gpu-003"], "gpu-[001-003]"),
        (["gpu-001", "gpu-003", "gpu-004", "login"], "gpu-[001,003-004],login"),
        (["a1", "a2", "a10", "a11"], "a[1-2],a[10-11]"),
        (["x1-2", "x1-3"], "x1-[2-3]"),
        (["gpu-001", "gpu-001"], "gpu-001"),
    ],
)
def test_hostlists(names: list[str], folded: str) -> None:
    assert hostlist.fold(names) == folded


NAME = st.from_regex(re.compile(r"[a-z]{1,3}-?[0-9]{0,4}", re.ASCII), fullmatch=True)


@given(st.sets(NAME, max_size=40))
def test_a_folded_list_means_the_same_nodes(names: set[str]) -> None:
    assert set(expand(hostlist.fold(names))) == names


@pytest.mark.parametrize(
    "word", ["gpu-[", "gpu-[]", "gpu-[a-b]", "gpu-[3-1]", "gpu-[1-99999999]", "gpu-[1-]"]
)
def test_a_wrong_list_is_usage(word: str) -> None:
    with pytest.raises(FleetError) as caught:
        expand(word)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "never"), (0, "0s"), (-3, "0s"), (59.9, "59s"), (119, "119s"), (120, "2m"), (3599, "59m"),
        (7199, "119m"),
        (7200, "2h"), (172799, "47h"), (172800, "2d"), (1e9, "11574d"), (True, "never"),
    ],
)  # fmt: skip
def test_ages(seconds: object, text: str) -> None:
    assert render.age(seconds) == text


WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30)


@given(
    rows=st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=12)), max_size=6),
    limit=st.integers(50, 120),
)
def test_a_table_loses_no_word(rows: list[tuple[str, list[str]]], limit: int) -> None:
    table = render.table(
        [Column("A"), Column("B", fold=True)], [[first, " ".join(rest)] for first, rest in rows], limit
    )
    text = " ".join(table).split()
    for first, rest in rows:
        assert first in text
        assert all(word in text for word in rest)
    assert all(len(line) <= max(limit, 64) for line in table)


def test_colour_does_not_move_columns() -> None:
    rows = [[render.state("critical", True), "a"], [render.state("ok", True), "b"]]
    plain = [[render.state("critical"), "a"], [render.state("ok"), "b"]]
    head = [Column("STATE"), Column("X")]
    assert [click.unstyle(line) for line in render.table(head, rows, 80)] == render.table(head, plain, 80)


def test_csv_keeps_what_is_hard() -> None:
    text = render.as_csv(["a", "b"], [[None, 'x,"y"'], ["line\nbreak", {"k": [1]}]])
    assert text == 'a,b\n,"x,""y"""\n"line\nbreak","{""k"":[1]}"\n'


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("uptime_s", 3340800.0, "uptime 38 d 16 h"),
        ("mem_available_bytes", 470 << 30, "memory available 470 GiB"),
        ("spool_bytes", 0, "spool 0 B"),
        ("mtu_bytes", 9000, "mtu 9000 B"),
        ("spool_bytes", 3 << 39, "spool 1.5 TiB"),
        ("spool_oldest_s", 0.25, "spool oldest 0.25 s"),
        ("cpus", 96, "cpus 96"),
    ],
)
def test_values_for_people(name: str, value: float, shown: str) -> None:
    assert render.measured(name, value) == shown
