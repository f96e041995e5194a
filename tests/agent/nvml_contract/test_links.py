"""NVLinks through the real binding: fields and functions of one link, and what each generation counts."""

from collections.abc import Callable
from typing import Protocol, cast

import pytest

Row = dict[str, object]
ABSENT = ["NOT_SUPPORTED", "NVML 3"]


class Reader(Protocol):
    def say(self, *lines: str) -> None: ...
    def ask(self, do: str, index: int = 0, group: str = "gpu") -> object: ...


Start = Callable[..., Reader]


def links(reader: Reader, index: int = 0) -> list[Row]:
    return cast(list[Row], reader.ask("links", index))


def column(rows: list[Row], name: str) -> list[object]:
    return [row.get(name) for row in rows]


def probe(reader: Reader) -> list[Row]:
    error, rows = cast(tuple[str, list[Row]], reader.ask("probe", group="nvlink"))
    assert error == ""
    return rows


HOPPER = (
    "number links 18", "field 91 1 18 0", "field 165 1 1 0", "field 164 1 26562 0", "field 161 3 3 0",
    "field 162 3 2 0", "field 163 3 5 0", "field 163:7 3 50 0", "field 138 3 10 0", "field 139 3 20 0",
    "number nvmlDeviceGetNvLinkVersion 6",
    # what Hopper answers to the fields of older cards
    *(f"field {number} 3 0 0" for number in (*range(32, 60), *range(96, 120), *range(148, 161))),
)  # fmt: skip


def test_a_hopper_card_counts_by_its_own_fields(reader: Start) -> None:
    new = reader("new")
    new.say(*HOPPER)
    rows = links(new)
    assert len(rows) == 18
    assert rows[7] == {
        "link": 7, "link_state": "active", "version": "4.0", "remote_kind": "switch",
        "remote_pci": "0000:0a:00.0", "speed_gb_per_s": pytest.approx(26.562), "crc_errors_total": 50,
        "replays_total": 3, "recoveries_total": 2, "ecc_errors_total": 7004, "tx_bytes_total": 10240,
        "rx_bytes_total": 20480,
    }  # fmt: skip


def test_a_hopper_card_without_its_fields_is_asked_by_function_and_never_by_the_old_ones(
    reader: Start,
) -> None:
    new = reader("new")
    new.say(*HOPPER, "field 161 3 0 3", "field 162 3 0 2", "field 163 3 0 3", "field 163:7 3 0 3")
    row = links(new)[7]
    assert row["replays_total"] == 7000
    assert row["recoveries_total"] == 7001
    assert row["crc_errors_total"] == 7002 + 7003
    new.say(*HOPPER, "field 161 3 0 3", "field 162 3 0 3", "field 163 3 0 3", "field 163:7 3 0 3",
            "fail nvmlDeviceGetNvLinkErrorCounter 3")  # fmt: skip
    row = links(new, 1)[7]
    assert row["replays_total"] == row["crc_errors_total"] == ABSENT


def test_an_ampere_card_has_a_field_per_link(reader: Start) -> None:
    new = reader("new")
    new.say(
        "number links 12", "field 91 1 12 0", "field 165 1 1 0",
        "number nvmlDeviceGetNvLinkVersion " + "4 " * 12,
        *(f"field {32 + link} 3 {link} 0" for link in range(6)),
        *(f"field {96 + link} 3 {6 + link} 0" for link in range(6)),
        *(f"field {number} 3 100 0" for number in (*range(39, 45), *range(102, 108))),
        "field 46 3 11 0", "field 113 3 12 0", "field 59 3 999 0", "field 161 3 777 0", "field 153 3 4 0",
        "field 154 3 5 0",
    )  # fmt: skip
    rows = links(new)
    assert column(rows, "crc_errors_total") == [100 + link for link in range(12)]
    assert rows[0]["replays_total"] == 11
    assert rows[11]["replays_total"] == 12
    assert rows[5]["ecc_errors_total"] == 4
    assert rows[6]["ecc_errors_total"] == 5
    assert rows[3]["replays_total"] == 3000, "what has no field is asked by function"
    assert set(column(rows, "version")) == {"3.0"}


def test_a_blackwell_card_has_other_counters(reader: Start) -> None:
    new = reader("new")
    new.say(
        "number links 18", "field 91 1 18 0", "field 165 1 1 0", "field 165:4 1 2 0", "field 165:5 1 3 0",
        "number nvmlDeviceGetNvLinkVersion " + "7 " * 18, "field 161 3 0 0", "field 163 3 0 0",
        "field 215 3 4 0", "field 214:2 3 1 0", "field 208 3 6 0", "field 202 3 1000 0",
        "field 164 1 53125 0",
        f"field 220 3 {15 << 8 | 255} 0", f"field 220:3 3 {2 << 8 | 7} 0",
    )  # fmt: skip
    rows = links(new)
    assert column(rows, "recoveries_total") == [4] * 18
    assert rows[2]["recoveries_failed_total"] == 1
    assert rows[3]["recoveries_failed_total"] == ABSENT
    assert rows[0]["rx_errors_total"] == 6
    assert rows[0]["effective_ber"] == 0.0
    assert rows[3]["effective_ber"] == pytest.approx(2e-7)
    assert rows[0]["tx_bytes_total"] == 1000
    assert [rows[link]["link_state"] for link in (3, 4, 5)] == ["active", "sleep", "no_traffic"]
    assert not {"crc_errors_total", "replays_total"} & rows[0].keys(), "a zero there would be a lie"


@pytest.mark.parametrize("architecture", [10, 13])
def test_without_a_version_the_architecture_decides(reader: Start, architecture: int) -> None:
    new = reader("new")
    new.say("number links 2", "field 91 1 2 0", "field 165 1 1 0", "field 215 3 1 0",
            "fail nvmlDeviceGetNvLinkVersion 3",
            f"number nvmlDeviceGetArchitecture {architecture}")  # fmt: skip
    row = links(new)[0]
    assert row["recoveries_total"] == 1
    assert row["version"] == ["NOT_SUPPORTED", ""]
    assert "replays_total" not in row


def test_a_generation_that_nobody_tells_has_no_counts(reader: Start) -> None:
    new = reader("new")
    new.say("number links 2", "field 165 1 1 0", "field 163 3 0 0", "field 38 3 0 0",
            "fail nvmlDeviceGetNvLinkVersion 3", "fail nvmlDeviceGetArchitecture 3")  # fmt: skip
    assert links(new)[0]["crc_errors_total"] == ["NOT_SUPPORTED", "unknown generation"]


def test_an_old_driver_is_asked_link_by_link(reader: Start) -> None:
    old = reader("old")
    old.say("number links 6", "number nvmlDeviceGetNvLinkVersion 2 2 2 2 2 2",
            "number nvmlDeviceGetNvLinkState 1 1 0 1 1 1", "fail nvmlDeviceGetFieldValues 13",
            "fail nvmlDeviceGetNvLinkState:4 3")  # fmt: skip
    rows = links(old)
    assert column(rows, "link") == [0, 1, 2, 3, 5], "some links may not be there"
    assert column(rows, "link_state") == ["active", "active", "inactive", "active", "active"]
    assert rows[3]["replays_total"] == 3000
    assert rows[2]["remote_pci"] == ["NOT_SUPPORTED", ""]
    assert rows[3]["remote_pci"] == "0000:0a:00.0"


def test_cards_without_links_and_those_that_do_not_say(reader: Start) -> None:
    new = reader("new")
    assert links(new) == []
    new.say("fail nvmlDeviceGetNvLinkState@1 4")
    (row,) = links(new, 1)
    assert row["link_state"] == ["NO_PERMISSION", "NVML 4"]
    card = probe(new)[-1]
    assert card["links_active"] is None


def test_F01_a_zero_of_the_field_must_be_confirmed(reader: Start) -> None:
    new = reader("new")
    new.say(*HOPPER, "field 165 1 0 0")
    assert set(column(links(new), "link_state")) == {"active"}
    new.say(*HOPPER, "field 165 1 0 0", "number nvmlDeviceGetNvLinkState " + "0 " * 18)
    assert set(column(links(new), "link_state")) == {"inactive"}
    new.say(*HOPPER, "field 165 1 0 0", "fail nvmlDeviceGetNvLinkState 13")
    assert set(column(links(new, 1), "link_state")) == {"inactive"}


def test_a_count_that_is_too_high_ends_at_the_last_link(reader: Start) -> None:
    new = reader("new")
    new.say(
        "number links 4",
        "field 91 1 18 0",
        *(f"field 165:{link} 1 1 {0 if link < 4 else 2}" for link in range(18)),
    )
    assert column(links(new), "link") == [0, 1, 2, 3]


def test_one_link_that_cannot_be_read_makes_the_count_unknown(reader: Start) -> None:
    new = reader("new")
    new.say(*HOPPER)
    assert probe(new)[-1]["links_active"] == 18
    new.say(*HOPPER, "field 165:3 1 0 10", "fail nvmlDeviceGetNvLinkState:3 10")
    card = next(row for row in probe(new) if row["link"] is None)
    assert (card["state"], card["links"], card["links_active"], card["links_up"]) == ("ok", 18, None, None)
    assert card["links_most"] == 18
    new.say(*HOPPER)
    assert next(row for row in probe(new) if row["link"] is None)["links_active"] == 18


def test_a_card_that_is_lost_among_its_links_costs_itself_alone(reader: Start) -> None:
    new = reader("new")
    new.say("number links 18")
    assert {row["state"] for row in probe(new)} == {"ok"}
    dead = ("fail nvmlDeviceGetNvLinkErrorCounter:9@1 15", "fail nvmlDeviceGetHandleByPciBusId_v2@1 15")
    new.say("number links 18", *dead)
    rows = [row for row in probe(new) if row["link"] is None]
    assert [row["state"] for row in rows] == ["ok", "lost"]
    assert [row["links_active"] for row in rows] == [18, None]
    assert not [row for row in probe(new) if row["gpu_index"] == 1 and row["link"] is not None]


def test_a_link_that_comes_up_is_asked_again_for_what_it_did_not_have(reader: Start) -> None:
    new = reader("new")
    new.say(*HOPPER, "field 163:3 3 0 3", "field 165:3 1 0 0", "fail nvmlDeviceGetNvLinkErrorCounter:3 3",
            "number nvmlDeviceGetNvLinkState 1 1 1 0")  # fmt: skip
    assert links(new)[3]["crc_errors_total"] == ABSENT
    new.say(*HOPPER)
    assert links(new)[3]["link_state"] == "active"
    assert links(new)[3]["crc_errors_total"] == 5
