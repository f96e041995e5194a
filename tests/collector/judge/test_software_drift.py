"""Rule software_drift: driver, kernel and firmware against the nodes with the same cards."""

import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "software_drift"
LATELY = timedelta(hours=3)


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def tell(fleet: "Fleet", name: str, entity: str = "node:", at: datetime | None = None, **said: str) -> None:
    """An item of a node as its agent tells it from then on."""
    since = at or fleet.at
    with fleet.store.transaction() as write:
        write.execute(
            "UPDATE live.inventory SET valid_to = ? WHERE node = ? AND entity = ? AND valid_to IS NULL",
            [since, name, entity],
        )
        write.execute(
            "INSERT INTO live.inventory SELECT DISTINCT ON (entity) * REPLACE (? AS attributes, ?::TIMESTAMP "
            "AS valid_from, NULL AS valid_to) FROM live.inventory WHERE node = ? AND entity = ?",
            [json.dumps(said), since, name, entity],
        )


def crowd(fleet: "Fleet", count: int = 10, **said: str) -> list[str]:
    names = [f"gpu-{n:03}" for n in range(count)]
    long_ago = fleet.at - timedelta(days=5)
    for name in names:
        node = fleet.add(name, gpus=2)
        tell(fleet, name, at=long_ago, driver_version="580.95.05", kernel="6.8.0-60", **said)
        for card in node.cards:
            tell(fleet, name, card.entity, at=long_ago, vbios="96.00.89.00.01", inforom="G520.0200.00.05")
    return names


@pytest.mark.drill("software_drift", "fires")
def test_an_old_driver_fires_and_clears_when_it_is_updated(fleet: "Fleet", judge: Judge) -> None:
    names = crowd(fleet)
    tell(fleet, names[3], at=fleet.at - timedelta(days=4), driver_version="570.12", kernel="6.8.0-60")
    fleet.run(10, judge, every=5)
    assert fleet.find(RULE, node=names[3])[3] == "driver version 570.12 where 9 of 10 nodes have 580.95.05"
    assert fleet.find(RULE, node=names[0])[:2] == ("ok", "as_peers")
    fleet.at += timedelta(minutes=5)
    fleet.run(10, judge, every=5)
    assert fleet.findings() == [(names[3], "node:", "firing", "warn", "differs")]
    tell(fleet, names[3], driver_version="580.95.05", kernel="6.8.0-60")
    for _ in range(2):
        fleet.at += timedelta(minutes=5)
        fleet.run(10, judge, every=5)
    assert fleet.findings() == []


def test_firmware_of_one_card(fleet: "Fleet", judge: Judge) -> None:
    names = crowd(fleet)
    card = fleet.nodes[names[2]].cards[1]
    tell(fleet, names[2], card.entity, at=fleet.at - timedelta(days=4), vbios="96.00.61.00.01", inforom="")
    fleet.run(10)
    assert fleet.find(RULE, node=names[2])[:2] == ("warn", "differs")
    assert "vbios 96.00.61.00.01" in fleet.find(RULE, node=names[2])[3]


@pytest.mark.drill("software_drift", "near_miss")
def test_an_update_under_way_is_no_drift_and_one_that_rests_is(fleet: "Fleet", judge: Judge) -> None:
    names = crowd(fleet)
    for name in names[:4]:
        tell(fleet, name, at=fleet.at - LATELY, driver_version="590.1", kernel="6.8.0-60")
    fleet.run(10)
    verdicts = {name: fleet.find(RULE, node=name)[:2] for name in names}
    assert {verdicts[name] for name in names} == {("n/a", "update_in_progress")}
    for name in names[4:9]:
        tell(fleet, name, at=fleet.at - LATELY, driver_version="590.1", kernel="6.8.0-60")
    fleet.run(10)
    assert fleet.find(RULE, node=names[9])[0] == "n/a", "the last one has time until the update rests"
    fleet.at += timedelta(days=1)
    fleet.run(10)
    assert fleet.find(RULE, node=names[9])[:2] == ("warn", "differs")
    assert fleet.find(RULE, node=names[0])[0] == "ok"


@pytest.mark.drill("software_drift", "not_judged")
def test_pools_few_peers_no_cards_and_silence(fleet: "Fleet", judge: Judge) -> None:
    names = crowd(fleet, 4)
    tell(fleet, names[0], at=fleet.at - timedelta(days=4), driver_version="1")
    fleet.add("login", gpus=0)
    fleet.run(10)
    assert fleet.find(RULE, node=names[0])[:2] == ("n/a", "few_peers")
    assert fleet.find(RULE, node="login")[:2] == ("n/a", "no_cards")
    for n in range(12):
        name = f"b-{n:03}"
        fleet.add(name, gpus=1)
        pool, driver = ("a", "580") if n < 6 else ("b", "570")
        tell(fleet, name, at=fleet.at - timedelta(days=2), driver_version=driver, **{"label.pool": pool})
    mute = fleet.add("mute", gpus=1)
    fleet.run(10)
    assert {fleet.find(RULE, node=f"b-{n:03}")[:2] for n in range(12)} == {("ok", "as_peers")}
    assert fleet.find(RULE, node="mute")[:2] == ("unknown", "not_told")
    mute.up = False
    fleet.run(130)
    assert fleet.find(RULE, node="mute")[:2] == ("unknown", "agent_silent")


def test_a_version_that_is_not_told_any_more_is_not_mended(fleet: "Fleet", judge: Judge) -> None:
    name = crowd(fleet)[2]
    for vbios in ("96.00.61.00.01", ""):
        for card in fleet.nodes[name].cards:
            tell(
                fleet,
                name,
                card.entity,
                at=fleet.at - timedelta(days=2),
                vbios=vbios,
                inforom="G520.0200.00.05",
            )
        for _ in range(3):
            fleet.at += timedelta(minutes=5)
            fleet.run(10, judge, every=5)
        assert fleet.findings() == [(name, "node:", "firing", "warn", "differs")]
    assert fleet.find(RULE, node=name)[:2] == ("unknown", "not_read")
    assert fleet.find(RULE, node="gpu-000")[:2] == ("ok", "as_peers")
