"""Rule certificate_expiry: certificates of agents and of the collector that end soon."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Cell, Fleet

RULE = "certificate_expiry"
DAY, YEAR = 86400.0, 365 * 86400.0


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def tell(fleet: "Fleet", left: "dict[str, tuple[float, float] | None]") -> None:
    """The agents' own rows with days left and lives of their certificates."""
    names = (
        "ts",
        "received_at",
        "node",
        "boot_id",
        "probe",
        "ok",
        "error",
        "certificate_left_s",
        "certificate_life_s",
    )
    rows: list[list[Cell]] = [
        [fleet.at, fleet.at, node, "b", "agent", True, "", *(held or (None, None))]
        for node, held in left.items()
    ]
    with fleet.store.transaction() as write:
        write.executemany(
            f"INSERT INTO live.agent ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})", rows
        )


def own(fleet: "Fleet", until: datetime) -> None:
    with fleet.store.transaction() as write:
        write.execute("DELETE FROM live.certificate")
        write.execute(
            "INSERT INTO live.certificate VALUES (?, ?, ?)", [until - timedelta(days=365), until, fleet.at]
        )


@pytest.mark.drill("certificate_expiry", "fires")
def test_it_warns_gets_critical_and_clears_when_renewed(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=0)
    fleet.run(5)
    for left, found in (
        (20 * DAY, []),
        (13 * DAY, ["warn"]),
        (2 * DAY, ["crit"]),
        (-DAY, ["crit"]),
        (364 * DAY, []),
    ):
        for _ in range(2):
            fleet.at += timedelta(minutes=1)
            tell(fleet, {"gpu-001": (left, YEAR)})
            judge.run_pass(fleet.at)
        assert [row[3] for row in fleet.findings()] == found, left


def test_the_collectors_own(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=0)
    own(fleet, fleet.at + timedelta(days=10))
    for _ in range(2):
        fleet.at += timedelta(minutes=1)
        judge.run_pass(fleet.at)
    assert fleet.findings() == [("(collector)", "agent:", "firing", "warn", "renew")]
    own(fleet, fleet.at + timedelta(days=300))
    for _ in range(2):
        fleet.at += timedelta(minutes=1)
        judge.run_pass(fleet.at)
    assert fleet.findings() == []
    fleet.at += timedelta(hours=4)
    assert fleet.find(RULE, "agent:")[:2] == ("unknown", "not_heard"), "the file was not read for hours"


@pytest.mark.drill("certificate_expiry", "near_miss", "not_judged")
def test_short_lives_no_certificate_and_silence(fleet: "Fleet", judge: Judge) -> None:
    told: dict[str, tuple[float, float] | None] = {
        "daily": (0.5 * DAY, DAY),
        "late": (0.1 * DAY, DAY),
        "ended": (-60.0, DAY),
        "plain": None,
        "year": (15 * DAY, YEAR),
    }
    for name in (*told, "silent"):
        fleet.add(name, gpus=0)
    tell(fleet, told)
    fleet.at += timedelta(seconds=5)
    assert {name: fleet.find(RULE, node=name)[:2] for name in (*told, "silent")} == {
        "daily": ("ok", "holds"),
        "late": ("warn", "renew"),
        "ended": ("crit", "expired"),
        "plain": ("n/a", "no_certificate"),
        "year": ("ok", "holds"),
        "silent": ("unknown", "not_heard"),
    }
