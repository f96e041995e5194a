"""What single files say, and what they do not."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.amdgpu_files import (
    clock_reasons,
    current_level,
    energy_j,
    errors,
    highest_level,
    parsed,
)

FAILED = Null(Reason.FAILED, "unparsable")


def _table(layout: int, content: int, size: int, **fields: int) -> bytes:
    table = bytearray(b"\xff" * size)
    struct.pack_into("<HBB", table, 0, size, layout, content)
    for place, value in fields.items():
        struct.pack_into("<Q", table, int(place.removeprefix("at_")), value)
    return bytes(table)


@pytest.mark.parametrize(
    ("text", "current", "highest"),
    [
        ("0: 500Mhz\n1: 800Mhz *\n2: 1700Mhz\n", 800.0, 1700),
        ("0: 132Mhz *\n", 132.0, 132),
        ("S: 19Mhz *\n0: 615Mhz\n1: 800Mhz\n", 19.0, 800),
        ("0: 500MHz *\n1: 500MHz *\n", 500.0, 500),
        ("0: 500Mhz *\n1: 800Mhz *\n", Null(Reason.FAILED, "no one level"), 800),
        ("0: 500Mhz\n1: 800Mhz\n", Null(Reason.FAILED, "no one level"), 800),
        ("", FAILED, FAILED),
        ("\n", FAILED, FAILED),
        ("0: 999999Mhz *\n", FAILED, FAILED),
        ("0: 2.5GT/s, x8 *\n", FAILED, FAILED),
    ],
)
def test_levels(text: str, current: Cell, highest: Cell) -> None:
    assert parsed(text, current_level) == current
    assert parsed(text, highest_level) == highest


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ue: 0\nce: 0\n", (0, 0)),
        ("ue: 2\nce: 40\nde: 3\n", (40, 2)),
        ("Query currently inaccessible\n", Null(Reason.FAILED, "inaccessible")),
        ("ue: 0\n", FAILED),
        ("ue: x\nce: 0\n", FAILED),
        ("ue: 99999999999999999999\nce: 0\n", FAILED),
        ("", FAILED),
    ],
)
def test_errors_of_a_block(text: str, found: tuple[int, int] | Null) -> None:
    assert errors(text) == found


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [(0, 0), (1 << 3, 4), (1 << 17, 4), (1 << 36, 32), (1 << 38, 32), (1 << 47, 8), (1 << 48 | 1 << 49, 0)],
)
def test_throttling_in_the_words_of_clock_reasons(bits: int, reasons: int) -> None:
    assert clock_reasons(_table(1, 3, 120, at_112=bits)) == reasons
    assert clock_reasons(_table(1, 3, 120, at_112=bits | 1 | 1 << 33)) == reasons | 4 | 32


@pytest.mark.parametrize(
    ("content", "size", "place"), [(4, 288, 24), (5, 360, 88), (6, 1664, 16), (7, 2208, 24), (8, 3000, 24)]
)
def test_energy_of_every_revision_that_has_a_unit(content: int, size: int, place: int) -> None:
    assert energy_j(_table(1, content, size, **{f"at_{place}": 3 << 15})) == 1.5


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_table(1, 1, 96), Reason.NOT_SUPPORTED),
        (_table(1, 2, 104), Reason.NOT_SUPPORTED),
        (_table(2, 2, 128), Reason.NOT_SUPPORTED),
        (_table(1, 3, 120), Reason.NOT_SUPPORTED),  # all ones: the firmware does not fill it
        (_table(1, 3, 120, at_112=1)[:-1], Reason.FAILED),
        (_table(1, 3, 120, at_112=1) + b"\0", Reason.FAILED),
        (_table(1, 3, 128, at_112=1), Reason.FAILED),
        (b"", Reason.FAILED),
        (b"\x78\x00\x01", Reason.FAILED),
    ],
)
def test_a_table_of_another_shape_gives_no_number(data: bytes, reason: Reason) -> None:
    found = clock_reasons(data)
    assert isinstance(found, Null)
    assert found.reason is reason


def test_an_earlier_layout_of_revision_6_gives_no_number() -> None:
    assert energy_j(_table(1, 6, 888, at_16=5)) == FAILED


def test_a_table_longer_than_a_page_is_cut() -> None:
    whole = _table(1, 8, 5000, at_24=1 << 16)
    assert energy_j(whole[:4095]) == 1.0
    assert energy_j(whole[:4000]) == FAILED


@given(st.binary(max_size=400) | st.builds(_table, st.just(1), st.integers(0, 9), st.integers(4, 400)))
def test_any_table_gives_a_number_or_a_reason(data: bytes) -> None:
    for cell in (clock_reasons(data), energy_j(data)):
        assert isinstance(cell, Null) or (isinstance(cell, int | float) and cell >= 0)


@given(st.text())
def test_any_text_gives_levels_or_a_reason(text: str) -> None:
    for cell in (parsed(text, current_level), parsed(text, highest_level)):
        assert isinstance(cell, int | float | Null)
    assert isinstance(errors(text), tuple | Null)
