"""Rule rule_failed: a rule that does not run is a finding, on the collector, and stops no other."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeOptions, JudgeSettings, RuleOverride
from gpufleet_collector.rules import Rule, load_rules, parse_rule
from gpufleet_collector.store import LIVE, Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULE = "rule_failed"

TEXT = """/*
title = "Made up"
every = "10s"
for = "1 of 1"
runbook = "made_up"
*/
create or replace macro find_{name}(as_of) as table
select 'n' as node, 'node:' as entity, {verdict} as verdict, 'c' as code, 1::double as observed,
       1::double as expected, '' as unit, as_of as evidence_at, '' as reason, '{{}}'::json as detail {tail};
"""


def made(name: str, verdict: str = "'warn'", tail: str = "") -> Rule:
    return parse_rule(name, TEXT.format(name=name, verdict=verdict, tail=tail))


def own() -> Rule:
    [rule] = [rule for rule in load_rules() if rule.name == RULE]
    return rule


def passes(fleet: "Fleet", judge: Judge, count: int) -> None:
    for _ in range(count):
        fleet.at += timedelta(seconds=20)
        judge.run_pass(fleet.at)


@pytest.mark.drill("rule_failed", "fires")
def test_what_fails_fires_stops_no_other_and_clears(fleet: "Fleet", store: Store) -> None:
    fleet.add("gpu-001", gpus=1)
    with store.transaction() as write:
        write.execute("CREATE TABLE live.mood (bad BOOLEAN)")
        write.execute("INSERT INTO live.mood VALUES (true)")
    moody = made("moody", "if(bad, error('boom'), 'ok')", "from mood")
    endless = made("endless", "'ok'", "from mood, range(if(bad, 100000000000, 1)) t(i) where hash(i) = 1")
    settings = JudgeSettings(judge=JudgeOptions(rule_timeout="0.3s"))
    judge = Judge(store, settings, rules=[endless, made("good"), moody, own()])
    passes(fleet, judge, 2)
    assert fleet.findings() == [("(collector)", "rule:endless", "pending", "warn", "stopped"),
                                ("(collector)", "rule:moody", "pending", "warn", "failed"),
                                ("n", "node:", "firing", "warn", "c")]  # fmt: skip
    passes(fleet, judge, 5)
    assert fleet.findings(RULE) == [
        ("(collector)", "rule:endless", "firing", "warn", "stopped"),
        ("(collector)", "rule:moody", "firing", "warn", "failed"),
    ]
    [(said,)] = fleet.sql("SELECT reason FROM finding WHERE entity = 'rule:moody'")
    assert str(said).startswith("rule moody fails: ")
    assert "boom" in str(said)
    with store.transaction() as write:
        write.execute("UPDATE live.mood SET bad = false")
    passes(fleet, judge, 12)
    assert fleet.findings(RULE) == []


@pytest.mark.drill("rule_failed", "near_miss")
def test_one_failure_is_no_finding(fleet: "Fleet", store: Store) -> None:
    with store.transaction() as write:
        write.execute("CREATE TABLE live.mood (bad BOOLEAN)")
        write.execute("INSERT INTO live.mood VALUES (true)")
    judge = Judge(
        store, JudgeSettings(), rules=[made("moody", "if(bad, error('boom'), 'ok')", "from mood"), own()]
    )
    passes(fleet, judge, 1)
    with store.transaction() as write:
        write.execute("UPDATE live.mood SET bad = false")
    passes(fleet, judge, 12)
    assert fleet.sql("SELECT count(*) FROM finding WHERE fired_at IS NOT NULL AND rule = ?", RULE) == [(0,)]


@pytest.mark.drill("rule_failed", "not_judged")
def test_slow_waiting_broken_switched_off_and_not_run(fleet: "Fleet") -> None:
    fleet.add("gpu-001", gpus=1)
    rules = {
        "good": made("good"),
        "heavy": made("heavy"),
        "waits": made("waits", tail="from gpu where false"),
        "broken": made("broken", tail="from nod_list"),
        "off": made("off"),
    }
    bare = Store.open(None)
    settings = JudgeSettings(rule={"off": RuleOverride(enabled=False)})
    judge = Judge(bare, settings, rules=[*rules.values(), own()])
    with bare.transaction() as write:
        write.execute(
            "INSERT INTO live.node VALUES ('n', 'n', 'm', 'b', 's', '1', '', ?, ?)", [fleet.at, fleet.at]
        )
    fleet.at += timedelta(seconds=20)
    judge.run_pass(fleet.at)
    with bare.transaction() as write:
        write.execute("UPDATE live.rule SET seconds = 6 WHERE rule = 'heavy'")

    def verdicts(seconds: float) -> dict[str, tuple[str, str]]:
        at = fleet.at + timedelta(seconds=seconds)
        with bare.reader(LIVE) as read:
            rows = read.execute(f"SELECT entity, verdict, code FROM find_{RULE}(TIMESTAMP '{at}')").fetchall()
        return {entity.removeprefix("rule:"): (verdict, code) for entity, verdict, code in rows}

    assert verdicts(5) == {
        "good": ("ok", "runs"),
        "heavy": ("warn", "slow"),
        "waits": ("n/a", "waits"),
        "broken": ("warn", "broken"),
        "off": ("n/a", "disabled"),
    }
    assert verdicts(600)["good"] == ("unknown", "not_run")
    report = judge.run_pass(fleet.at + timedelta(seconds=600))
    assert [run.counts.get("unknown", 0) > 0 for run in report.runs if run.rule == RULE] == [True]
    bare.close()


@pytest.mark.parametrize("name", [RULE])
def test_it_says_nothing_of_itself(fleet: "Fleet", store: Store, name: str) -> None:
    judge = Judge(store, JudgeSettings(), rules=[own()])
    passes(fleet, judge, 3)
    assert fleet.sql(f"SELECT * FROM find_{name}(TIMESTAMP '{fleet.at}')") == []
