"""Probe nvlink: what is sent when, what is remembered, and the simulated cards that have links."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from gpufleet.metric import Null, Reason, Row
from gpufleet_agent.drivers import Gpu, Host, Hung, Lost, Ring
from gpufleet_agent.drivers.simulated import SimulatedHost
from gpufleet_agent.guard import GuardedHost, HostSettings
from gpufleet_agent.pipe import Frames, Inventory, Skip
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import nvlink
from gpufleet_agent.sampler import CARD_PROBES, Sampler, Settings, read_inventory
from gpufleet_agent.scenario import parse

NAMES = [metric.name for metric in nvlink.METRICS]
Cells = dict[str, object]


@dataclass(eq=False)
class Card:
    pci: str = "0000:1b:00.0"
    uuid: str = "GPU-1"
    index: int = 0
    ring: Ring = field(default_factory=Ring)
    said: Sequence[Row] | Null = ()
    trouble: Exception | None = None

    def identity(self) -> dict[str, str]:
        return {"uuid": self.uuid}

    def read(self, group: str) -> Row:
        return {}

    def links(self) -> Sequence[Row] | Null:
        if self.trouble:
            raise self.trouble
        return self.said


class Cards:
    """As much of a host as the probe knows."""

    def __init__(self, *cards: Card) -> None:
        self.cards = cards
        self.epoch = 1

    def gpus(self) -> Sequence[Gpu]:
        return self.cards


class Time:
    t = 1000.0

    def __call__(self) -> float:
        return self.t


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(nvlink, "_clock", made)
    return made


def link(number: int, state: str | Null = "active", **more: float | str | Null) -> Row:
    return {"link": number, "link_state": state, "version": "4.0", "speed_gb_per_s": 26.5,
            "crc_errors_total": 0, "tx_bytes_total": 10, **more}  # fmt: skip


def sweep(host: object) -> list[Cells]:
    found = run_probe("nvlink", nvlink, cast(Host, host), pytest.fail)
    assert found.error == ""
    return [dict(zip(NAMES, row, strict=True)) for row in found.rows]


def numbers(rows: list[Cells]) -> list[object]:
    return [row["link"] for row in rows]


def test_a_card_is_the_sum_of_its_links(time: Time) -> None:
    card = Card(said=[
        link(0, crc_errors_total=3), link(1, "sleep"),
        link(2, "inactive", speed_gb_per_s=Null(Reason.NOT_SUPPORTED)),
        link(5, "no_traffic", effective_ber=1e-9), link(6, crc_errors_total=4, effective_ber=1e-12),
    ])  # fmt: skip
    row = sweep(Cards(card))[-1]
    expected = {
        "gpu_uuid": "GPU-1", "pci": "0000:1b:00.0", "link": None, "state": "ok", "links": 5,
        "links_active": 3, "links_up": 0b1000011, "links_most": 3, "version": "4.0",
        "speed_gb_per_s": pytest.approx(79.5),
        "crc_errors_total": 7, "tx_bytes_total": 50, "replays_total": None, "effective_ber": 1e-9,
        "link_state": None, "driver_epoch": 1,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


def test_a_link_is_sent_when_it_has_news_and_once_an_hour(time: Time) -> None:
    card = Card(said=[link(0), link(1), link(2)])
    host = Cards(card)
    assert numbers(sweep(host)) == [0, 1, 2, None]
    time.t += 30
    card.said = [link(0), link(1, tx_bytes_total=99, effective_ber=1e-15), link(2)]
    assert numbers(sweep(host)) == [None], "traffic and rates are no news"
    card.said = [link(0), link(1, "inactive"), link(2, crc_errors_total=1)]
    assert numbers(sweep(host)) == [1, 2, None]
    assert numbers(sweep(host)) == [None]
    time.t += 3570
    assert numbers(sweep(host)) == [0, 1, 2, None]
    assert numbers(sweep(host)) == [None]


def test_a_sampler_or_a_driver_that_started_anew_sends_all(time: Time) -> None:
    card = Card(said=[link(0), link(1)])
    host = Cards(card)
    sweep(host)
    host.epoch += 1
    assert numbers(sweep(host)) == [0, 1, None]
    assert numbers(sweep(Cards(card))) == [0, 1, None]


@pytest.mark.parametrize(("trouble", "state"), [(Lost("gpu_is_lost"), "lost"), (Hung("hung"), "hung")])
def test_a_card_in_trouble_costs_only_itself_and_tells_all_when_it_is_back(
    time: Time, trouble: Exception, state: str
) -> None:
    sick, well = Card(said=[link(0), link(1)]), Card(uuid="GPU-2", index=1, said=[link(0)])
    host = Cards(sick, well)
    sweep(host)
    sick.trouble = trouble
    rows = sweep(host)
    assert [(row["gpu_uuid"], row["link"], row["state"]) for row in rows] == [
        ("GPU-1", None, state), ("GPU-2", None, "ok"),
    ]  # fmt: skip
    assert (rows[0]["links_active"], rows[0]["links_most"]) == (None, 2)
    sick.trouble = None
    assert numbers(sweep(host)) == [0, 1, None, None]


@pytest.mark.parametrize(
    ("said", "reason"),
    [((), Reason.NOT_SUPPORTED), (Null(Reason.NOT_READ, "suspended"), Reason.NOT_READ)],
)
def test_no_links_or_no_answer_is_a_row_that_says_why(said: Sequence[Row] | Null, reason: Reason) -> None:
    host = cast(Host, Cards(Card(said=said)))
    found = run_probe("nvlink", nvlink, host, pytest.fail)
    (row,) = [dict(zip(NAMES, cells, strict=True)) for cells in found.rows]
    assert (row["state"], row["links"], row["links_active"], row["links_most"]) == ("ok", None, None, None)
    assert reason in found.reasons[0]


def test_F03_one_unread_link_makes_the_sample_unknown_and_not_fewer(time: Time) -> None:
    card = Card(said=[link(0), link(1)])
    host = Cards(card)
    sweep(host)
    card.said = [link(0), link(1, Null(Reason.FAILED, "NVML 10"), crc_errors_total=Null(Reason.FAILED))]
    row = sweep(host)[-1]
    assert (row["links"], row["links_active"], row["links_up"], row["links_most"]) == (2, None, None, 2)


def test_counts_of_a_link_that_is_not_read_are_kept_in_the_sum(time: Time) -> None:
    away = Null(Reason.NOT_SUPPORTED)
    card = Card(said=[link(0, crc_errors_total=5), link(1, crc_errors_total=1000)])
    host = Cards(card)
    sums = [sweep(host)[-1]["crc_errors_total"]]
    for said in (
        [link(0, crc_errors_total=6), link(1, "inactive", crc_errors_total=away)],
        [link(0, crc_errors_total=6)],
        [link(0, crc_errors_total=6), link(1, crc_errors_total=1001)],
        [link(0, crc_errors_total=away), link(1, crc_errors_total=away)],
    ):
        card.said = said
        sums.append(sweep(host)[-1]["crc_errors_total"])
    assert sums == [1005, 1006, 1006, 1007, None]
    host.epoch += 1
    card.said = [link(0, crc_errors_total=2), link(1, crc_errors_total=away)]
    assert sweep(host)[-1]["crc_errors_total"] == 2, "another start of the driver counts anew"


def test_the_inventory_keeps_the_best_that_was_shown(time: Time) -> None:
    card = Card(said=[link(0, "inactive"), link(1, "inactive")])
    host = Cards(card)
    shown = []
    for said in (
        [link(0), link(1, "inactive")],
        [link(0), link(1)],
        [link(0, "inactive")],
        (),
        Null(Reason.FAILED),
    ):
        card.said = cast(Sequence[Row], said)
        sweep(host)
        shown.append(nvlink.attributes(cast(Host, host), card)["nvlinks_active"])
    assert shown == ["1", "2", "2", "2", "2"]
    host.epoch += 1
    assert nvlink.attributes(cast(Host, host), card) == {
        "nvlinks": "2", "nvlinks_active": "2", "nvlink_version": "4.0",
    }  # fmt: skip


def test_the_inventory_asks_itself_where_the_probe_does_not_run() -> None:
    card = Card(said=[link(0), link(1, "inactive")])
    assert nvlink.attributes(cast(Host, Cards(card)), card)["nvlinks_active"] == "1"
    assert nvlink.attributes(cast(Host, Cards(card)), Card(uuid="GPU-2")) == {}


# ---- simulated cards


class Clock:
    t = 0.0

    def __call__(self) -> float:
        return self.t


@pytest.fixture
def clock() -> Clock:
    return Clock()


def play(clock: Clock, model: str, faults: str = "") -> SimulatedHost:
    text = f'[fleet]\nnodes = 1\ngpus = 2\nmodel = "{model}"\n{faults}'
    return parse(text.encode()).host("gpu-001", clock, 0)


def active(host: SimulatedHost) -> list[object]:
    return [row["links_active"] for row in sweep(host) if row["link"] is None]


@pytest.mark.parametrize(
    ("model", "links", "up", "version"),
    [
        ("H100", 18, 18, "4.0"), ("H200", 18, 18, "4.0"), ("A100", 12, 12, "3.0"), ("B200", 18, 18, "5.0"),
        ("H100 NVL", 18, 12, "4.0"), ("A100 PCIe", 12, 0, "3.0"), ("RTX 4090", None, None, None),
        ("L40S", None, None, None), ("T4", None, None, None), ("vGPU", None, None, None),
    ],
)  # fmt: skip
def test_F01_links_by_model(
    clock: Clock, model: str, links: int | None, up: int | None, version: str | None
) -> None:
    host = play(clock, model)
    row = sweep(host)[-1]
    assert (row["links"], row["links_active"], row["version"]) == (links, up, version)
    item = read_inventory(GuardedHost(host)).items[-1]
    assert item.attributes.get("nvlinks_active") == (None if up is None else str(up))


def test_a_bridge_leads_to_the_card_beside(clock: Clock) -> None:
    host = play(clock, "H100 NVL")
    rows = [row for row in sweep(host) if row["link"] == 0]
    assert [row["remote_pci"] for row in rows] == ["0000:43:00.0", "0000:1b:00.0"]
    assert {row["remote_kind"] for row in rows} == {"gpu"}


def test_links_go_down_and_come_back(clock: Clock) -> None:
    fault = (
        '[[fault]]\nnode = "gpu-001"\ngpu = 1\nkind = "nvlink_down"\nat = 10\nuntil = 20\n'
        "params = { link = 3, count = 2 }\n"
    )
    host = play(clock, "H100", fault)
    found = []
    for clock.t in (0.0, 10.0, 20.0):
        rows = sweep(host)
        found.append([row["links_active"] for row in rows if row["link"] is None])
    assert found == [[18, 18], [18, 16], [18, 18]]


def test_a_link_counts_its_errors_and_begins_anew_with_the_driver(clock: Clock) -> None:
    fault = (
        '[[fault]]\nnode = "gpu-001"\ngpu = 0\nkind = "nvlink_errors"\nat = 60\n'
        'params = { per_minute = 30, link = 5, what = "replay" }\n'
        '[[fault]]\nnode = "gpu-001"\nkind = "reboot"\nat = 300\nparams = { down_s = 60 }\n'
    )
    host = play(clock, "H100", fault)
    found = []
    for clock.t in (0.0, 60.0, 120.0, 240.0, 420.0):
        rows = [row for row in sweep(host) if row["gpu_index"] == 0]
        found.append((rows[-1]["replays_total"], [row["link"] for row in rows if row["replays_total"]][:-1]))
    assert found == [(0, []), (0, []), (30, [5]), (90, [5]), (30, [5])]


def test_F03_links_train_after_a_reboot(clock: Clock) -> None:
    fault = (
        '[[fault]]\nnode = "gpu-001"\ngpu = "*"\nkind = "nvlink_training"\nat = 1\n'
        "params = { seconds = 100 }\n"
        '[[fault]]\nnode = "gpu-001"\nkind = "reboot"\nat = 300\nparams = { down_s = 60 }\n'
    )
    host = play(clock, "H100", fault)
    found = []
    for clock.t in (0.0, 200.0, 360.0, 411.0, 460.0):
        found.append(active(host))
    assert found == [[18, 18], [18, 18], [0, 0], [9, 9], [18, 18]]


def test_mig_switches_the_links_off(clock: Clock) -> None:
    host = play(clock, "A100", '[[fault]]\nnode = "gpu-001"\ngpu = 0\nkind = "mig_on"\n')
    assert active(host) == [0, 12]


def test_cards_that_are_left_alone_or_lost(clock: Clock) -> None:
    fault = '[[fault]]\nnode = "gpu-001"\ngpu = 0\nkind = "card_lost"\nat = 10\n'
    host = play(clock, "H100", fault)
    left = GuardedHost(host, [Skip(pci=host.gpus()[1].pci)])
    assert [row["state"] for row in sweep(left) if row["link"] is None] == ["ok", "hung"]
    clock.t = 20.0
    assert [row["state"] for row in sweep(left) if row["link"] is None] == ["lost", "hung"]
    assert sum(row["link"] is not None for row in sweep(left)) == 0


def test_the_inventory_is_sent_again_when_more_links_are_up_and_not_when_one_flaps(clock: Clock) -> None:
    fault = (
        '[[fault]]\nnode = "gpu-001"\ngpu = "*"\nkind = "nvlink_training"\nparams = { seconds = 100 }\n'
        '[[fault]]\nnode = "gpu-001"\ngpu = 0\nkind = "nvlink_down"\nat = 300\nuntil = 330\n'
    )
    reads, writes = os.pipe()
    settings = Settings(host=HostSettings(driver="simulated"), probes={"nvlink": 30.0, "pci": 60.0})
    loop = Sampler(settings, GuardedHost(play(clock, "H100", fault)), None, writes, -1)
    frames = Frames()
    shown = []
    for clock.t in (0.0, 50.0, 150.0, 180.0, 300.0, 360.0):
        loop.once()
        messages = frames.feed(os.read(reads, 1 << 16))
        items = [item for one in messages if isinstance(one, Inventory) for item in one.items]
        shown.append([item.attributes["nvlinks_active"] for item in items if item.entity.startswith("gpu:")])
    os.close(reads)
    os.close(writes)
    assert shown == [["0", "0"], ["9", "9"], ["18", "18"], [], [], []]


def test_the_probe_is_read_after_what_needs_no_driver() -> None:
    settings = Settings(host=HostSettings(), probes={"nvlink": 30.0, "gpu": 5.0, "host": 10.0, "pci": 60.0})
    loop = Sampler(settings, GuardedHost(cast(Host, Cards())), None, -1, -1)
    names = [job.name for job in loop._jobs]
    assert names[:2] == ["probe host", "probe pci"]
    assert "nvlink" in CARD_PROBES
