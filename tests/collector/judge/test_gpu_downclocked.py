"""Rule gpu_downclocked: drills A01 and A03 and their relatives; hardware brake and heat by their counters."""

from typing import TYPE_CHECKING, cast

import pytest

from gpufleet_collector import explain
from gpufleet_collector.documents import NotFound, Row
from gpufleet_collector.findings import Policy
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings, Limit
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "gpu_downclocked"


@pytest.fixture
def rules() -> tuple[str, ...]:
    return (RULE,)


def minutes(fleet: "Fleet", judge: Judge, count: int) -> None:
    """Let minutes go by, with a pass every 30 s: two see the same minute."""
    for _ in range(2 * count):
        fleet.run(25)
        fleet.run(5, judge)


@pytest.mark.drill("gpu_downclocked", "fires")
def test_slow_under_load_fires_after_three_minutes(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    fleet.run(10, judge)
    card.clock = 1700.0
    minutes(fleet, judge, 2)
    assert [row[2] for row in fleet.findings()] == ["pending"]
    minutes(fleet, judge, 1)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", "no_reason")]
    verdict, code, evidence_at, reason = fleet.find(RULE, card.entity)
    assert (verdict, code) == ("warn", "no_reason")
    assert "1700 of 1950 MHz (cards of its host) over a minute under load" in reason
    assert evidence_at is not None
    assert evidence_at <= fleet.at


def test_the_reason_names_the_window_of_the_site(fleet: "Fleet", store: Store) -> None:
    limit = {RULE: {"window_s": Limit(value=15.0)}}
    fleet.judge = Judge(store, JudgeSettings(limit=limit), rules=[r for r in load_rules() if r.name == RULE])
    card = fleet.add("gpu-001").cards[2]
    card.clock = 1700.0
    fleet.run(60)
    verdict, _, _, reason = fleet.find(RULE, card.entity)
    assert (verdict, "(cards of its host) over 15 s under load" in reason) == ("warn", True)


@pytest.mark.drill("gpu_downclocked", "near_miss")
def test_a_little_slower_is_not_slow(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.clock = 0.94 * 1950
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "at_clock")
    assert fleet.findings() == []


def test_much_slower_is_critical(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.clock, card.reasons = 990.0, 0x68
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "hw_thermal")


@pytest.mark.drill("gpu_downclocked", "not_judged")
def test_A01_idle_is_never_judged(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.util, card.clock, card.reasons = 0.0, 345.0, 1
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "idle")
    assert fleet.findings() == []


@pytest.mark.parametrize(
    ("reasons", "code"), [(4, "power_cap"), (2, "clock_set"), (16, "clock_set"), (256, "clock_set")]
)
def test_A03_power_cap_and_clocks_people_set_are_normal(
    fleet: "Fleet", judge: Judge, reasons: int, code: str
) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.clock, card.reasons = 1500.0, reasons
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", code)
    assert fleet.findings() == []


def test_power_cap_by_its_counter(fleet: "Fleet", judge: Judge) -> None:
    """The bit was off at each sample, but the card counted its time at the limit."""
    card = fleet.add("gpu-001").cards[2]

    def tick(fleet: "Fleet") -> None:
        card.clock, card.cap_s = 1500.0, card.cap_s + 4.5
        card.reasons = 4 if fleet.at.second == 0 else 0

    fleet.each_tick = tick
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("ok", "power_cap")


@pytest.mark.parametrize(
    ("reasons", "code"),
    [(4 | 32, "sw_thermal"), (4 | 64, "hw_thermal"), (4 | 8, "hw_slowdown"), (4 | 128, "power_brake")],
)
def test_power_cap_does_not_excuse_heat_or_hardware(
    fleet: "Fleet", judge: Judge, reasons: int, code: str
) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.clock, card.reasons = 1500.0, reasons
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("crit", code)


def test_own_baseline_comes_first(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001", gpus=2)
    fleet.baseline("gpu-001", node.cards[0].entity, "sm_clock_busy_mhz", 1980.0)
    node.cards[0].clock = 1800.0
    minutes(fleet, judge, 2)
    verdict, code, _, reason = fleet.find(RULE, node.cards[0].entity)
    assert (verdict, code, "own baseline" in reason) == ("warn", "no_reason", True)
    assert fleet.find(RULE, node.cards[1].entity)[:2] == ("n/a", "no_expectation")


def test_peers_of_other_hosts_are_used_when_its_own_are_few(fleet: "Fleet", judge: Judge) -> None:
    slow = fleet.add("gpu-001", gpus=1).cards[0]
    slow.clock = 1000.0
    fleet.add("gpu-002", gpus=6)
    minutes(fleet, judge, 2)
    verdict, _, _, reason = fleet.find(RULE, slow.entity)
    assert (verdict, "cards of its model" in reason) == ("crit", True)


def test_the_start_of_a_job_is_not_load(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]

    def tick(fleet: "Fleet") -> None:
        card.util, card.clock = (95.0, 1000.0) if fleet.at.second >= 30 else (0.0, 345.0)

    fleet.each_tick = tick
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "idle")


def test_keeps_firing_when_idle_and_clears_when_judged_again(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.clock = 1700.0
    minutes(fleet, judge, 4)
    assert fleet.findings()[0][2] == "firing"
    card.util = 0.0
    minutes(fleet, judge, 5)
    assert fleet.findings()[0][2] == "firing", "idle proves nothing"
    card.util, card.clock = 95.0, 1950.0
    minutes(fleet, judge, 3)
    assert fleet.findings()[0][2] == "recovering"
    minutes(fleet, judge, 6)
    assert fleet.findings() == []


@pytest.mark.parametrize(("counter", "code"), [("brake_s", "power_brake"), ("heat_s", "hw_thermal")])
def test_hardware_brake_fires_within_two_samples(
    fleet: "Fleet", judge: Judge, counter: str, code: str
) -> None:
    card = fleet.add("gpu-001").cards[2]
    setattr(card, counter, 1234.5)
    fleet.run(30, judge)
    assert fleet.findings() == [], "what was counted before says nothing"
    reports = []
    for _ in range(2):
        setattr(card, counter, getattr(card, counter) + 0.5)
        reports += fleet.run(5, judge)
    assert [len(report.fired) for report in reports] == [0, 1]
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", code)]
    assert fleet.find(RULE, card.entity)[:3] == ("warn", code, fleet.at)


def test_hw_brake_of_an_idle_card_at_the_worst_moment_fires_within_two_samples_and_a_pass(
    fleet: "Fleet", judge: Judge
) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.util, card.reasons = 0.0, 1
    fleet.run(30, judge)

    def tick(fleet: "Fleet") -> None:
        card.brake_s += 5

    fleet.each_tick = tick  # it begins right after a sample, and after the pass that saw it
    card.reasons = 1 | 8 | 128
    reports = fleet.run(2 * 5 + 5, judge)  # two periods of sampling, and one pass
    assert any(report.fired for report in reports)
    assert fleet.findings() == [("gpu-001", card.entity, "firing", "warn", "power_brake")]


def test_whoever_looks_for_the_hardware_brake_is_led_here(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1)
    fleet.run(5, judge)
    rule = next(rule for rule in load_rules() if rule.name == RULE)
    headers = {RULE: explain.header(Policy.of(rule, JudgeSettings()))}
    with fleet.store.reader() as read:
        for name in ("hw_brake", "rule hw_brake", "power_brake", RULE):
            (item,) = cast(list[Row], explain.explain(read, fleet.at, name, headers)["items"])
            assert (item["rule"], item["runbook"]) == (RULE, f"docs/runbooks/{RULE}.md")
        with pytest.raises(NotFound):
            explain.explain(read, fleet.at, "no_such_brake", headers)


def test_one_growth_is_not_a_brake(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    fleet.run(20, judge)
    card.brake_s += 3
    fleet.run(60, judge)
    assert [row[2] for row in fleet.findings()] in ([], ["pending"])


@pytest.mark.parametrize("util", [95.0, 0.0])
def test_single_growths_with_clean_samples_between_do_not_add_up(
    fleet: "Fleet", judge: Judge, util: float
) -> None:
    """The minute's own evidence is older than the bad sample, and an idle card has none at all."""
    card = fleet.add("gpu-001").cards[2]
    card.util = util
    fleet.run(65, judge)
    for counter in ("brake_s", "brake_s", "heat_s", "heat_s"):
        setattr(card, counter, getattr(card, counter) + 0.3)
        fleet.run(20, judge)
        assert [row[2] for row in fleet.findings()] in ([], ["pending"])
    reports = []
    for _ in range(2):
        card.brake_s += 0.3
        reports += fleet.run(5, judge)
    assert [len(report.fired) for report in reports] == [0, 1], "two in a row still are one"


@pytest.mark.parametrize("util", [95.0, 0.0])
def test_a_brake_in_every_other_sample_is_one(fleet: "Fleet", judge: Judge, util: float) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.util = util
    fleet.run(65, judge)
    fired = 0
    for _ in range(20):
        card.brake_s += 3.0
        fired += sum(len(report.fired) for report in fleet.run(10, judge))
    assert fired == 1
    assert [row[2] for row in fleet.findings()] == ["firing"]


def test_brake_for_six_of_ten_minutes_is_critical(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]

    def tick(fleet: "Fleet") -> None:
        card.brake_s += 4

    fleet.each_tick = tick
    fleet.run(370)
    assert fleet.find(RULE, card.entity)[0] == "warn"
    fleet.run(120)
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "power_brake")


def test_counter_reset_is_no_brake(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    card = node.cards[2]
    card.brake_s = 500.0
    fleet.run(60, judge)
    card.brake_s, node.boot_id = 0.0, "boot-2"
    fleet.run(20, judge)
    assert fleet.findings() == []


def test_utilisation_that_a_mig_card_does_not_have(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.util = None
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "unreadable")
    with fleet.store.transaction() as write:
        write.execute(
            "INSERT INTO live.capability "
            "VALUES ('gpu-001', ?, 'gpu', 'util_pct', 'not_supported', 'NVML 3', ?)",
            [card.entity, fleet.at],
        )
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "no_utilisation")
    assert fleet.findings() == []


def test_card_without_rows_is_unknown(fleet: "Fleet", judge: Judge) -> None:
    node = fleet.add("gpu-001")
    node.up = False
    fleet.run(60, judge)
    assert fleet.find(RULE, node.cards[0].entity)[:2] == ("unknown", "no_samples")
    assert fleet.findings() == []


def test_hung_card_is_not_judged(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.state = "hung"
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("n/a", "hung")


@pytest.mark.parametrize("counter", ["brake_s", "heat_s"])
def test_reset_within_a_driver_start_is_not_hours_of_brake(
    fleet: "Fleet", judge: Judge, counter: str
) -> None:
    """9000 s, then 0, then a little growth: only what surely grew counts."""
    card = fleet.add("gpu-001").cards[2]
    setattr(card, counter, 9000.0)
    fleet.run(60, judge)
    setattr(card, counter, 0.0)
    fleet.run(10, judge)
    assert fleet.findings() == []
    for _ in range(6):
        setattr(card, counter, getattr(card, counter) + 0.02)
        fleet.run(5, judge)
    assert [row[2:4] for row in fleet.findings()] == [("firing", "warn")]
    seconds = fleet.sql("SELECT observed FROM finding")[0][0]
    assert isinstance(seconds, float)
    assert 0 < seconds <= 0.13


@pytest.mark.parametrize("bad", [99999.0, 0.0])
@pytest.mark.parametrize("ticks", [1, 3])
def test_bad_samples_of_a_counter_raise_nothing(fleet: "Fleet", judge: Judge, bad: float, ticks: int) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.brake_s = 500.0
    fleet.run(60, judge)
    card.brake_s = bad
    fleet.run(5 * ticks, judge)
    card.brake_s = 500.0
    fleet.run(60, judge)
    assert fleet.sql("SELECT 1 FROM finding") == []
    for _ in range(2):
        card.brake_s += 0.5
        fleet.run(5, judge)
    assert fleet.find(RULE, card.entity)[:2] == ("warn", "power_brake"), "true growth is still seen"
    seconds = fleet.sql("SELECT observed FROM finding")[0][0]
    assert isinstance(seconds, float)
    assert seconds <= 1


def test_a_power_cap_counter_that_was_reset_excuses_nothing(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.clock, card.cap_s = 1500.0, 9000.0

    def tick(fleet: "Fleet") -> None:
        card.cap_s = 9000.0 if fleet.at.second < 30 else 0.0

    fleet.each_tick = tick
    minutes(fleet, judge, 2)
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "no_reason")


def test_samples_sent_twice_hide_no_brake(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    fleet.run(30, judge)
    for _ in range(2):
        card.brake_s += 0.5
        fleet.run(5)
        with fleet.store.transaction() as write:
            write.execute("INSERT INTO live.gpu SELECT * FROM live.gpu WHERE ts = ?", [fleet.at])
        judge.run_pass(fleet.at)
    assert [row[2:] for row in fleet.findings()] == [("firing", "warn", "power_brake")]


def test_a_busy_card_without_a_clock_is_unknown(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    minutes(fleet, judge, 2)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.gpu SET sm_clock_mhz = NULL WHERE gpu_uuid = ?", [card.uuid])
    assert fleet.find(RULE, card.entity)[:2] == ("unknown", "no_clock")


def test_a_card_without_brake_counters_is_judged_by_its_clock(fleet: "Fleet", judge: Judge) -> None:
    card = fleet.add("gpu-001").cards[2]
    card.clock = 1500.0
    minutes(fleet, judge, 2)
    with fleet.store.transaction() as write:
        write.execute("UPDATE live.gpu SET hw_brake_s_total = NULL, hw_thermal_s_total = NULL")
    assert fleet.find(RULE, card.entity)[:2] == ("crit", "no_reason")
