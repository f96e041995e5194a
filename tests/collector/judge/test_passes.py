"""What a pass shares between its rules, and how rules take turns."""

import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

from gpufleet_collector import explain
from gpufleet_collector import judge as judging
from gpufleet_collector.findings import Policy
from gpufleet_collector.judge import SHARED, Judge, phases, shared
from gpufleet_collector.limits import JudgeSettings, compile_limits
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import LIVE, Store, StoreBroken

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

PASS_S = 5.0
POLICIES = {rule.name: Policy.of(rule, JudgeSettings()) for rule in load_rules()}


def test_shared_macros_are_asked_of_the_time_of_the_pass_alone() -> None:
    """A table that was made for one time must not answer for another."""
    folder = resources.files("gpufleet_collector") / "sql" / "rules"
    texts = {item.name: item.read_text() for item in folder.iterdir() if item.name.endswith(".sql")}
    calls = {
        (name, macro, given)
        for name, text in texts.items()
        for macro in SHARED
        for given in re.findall(rf"\b{macro}\(([^)]*)\)", text)
    }
    assert len(calls) > 30
    assert {call for call in calls if call[2] != "as_of"} == set()


def test_rules_say_the_same_with_and_without_what_is_shared(
    store: Store, fleet: "Fleet", judge: Judge
) -> None:
    cards = fleet.add("gpu-001").cards
    fleet.add("gpu-002")
    fleet.run(120)
    cards[1].state, cards[2].listed, cards[4].util = "lost", False, None
    fleet.run(10)
    judge.run_pass(fleet.at)
    with store.reader(LIVE) as plain, store.reader(LIVE) as sharing:
        for query in shared(SHARED, fleet.at):
            sharing.execute(query)
        seen = {
            rule: [
                sorted(read.execute(f"FROM find_{rule}(TIMESTAMP '{fleet.at}')").fetchall(), key=repr)
                for read in (plain, sharing)
            ]
            for rule in POLICIES
            if not judge.unmade(rule)
        }
    assert seen.keys() >= {"gpu_missing", "gpu_downclocked", "driver_hung", "xid", "bandwidth_regression"}
    for rule, (without, given) in seen.items():
        assert without == given, rule
    assert {row[3] for row in seen["gpu_missing"][1]} >= {"lost_at_run_time", "refused_by_driver", "present"}


def test_explain_shares_what_the_judge_shares_and_says_the_same(
    store: Store, fleet: "Fleet", judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = fleet.add("gpu-001").cards
    fleet.add("gpu-002")
    fleet.run(60)
    cards[1].state, cards[2].listed = "lost", False
    fleet.run(60, judge, every=10)
    headers = {rule: explain.header(policy) for rule, policy in judge.policies.items()}
    made = "SELECT table_name FROM duckdb_tables() WHERE temporary AND table_name LIKE '%\\_now' ESCAPE '\\'"

    def said() -> tuple[dict[str, object], set[str]]:
        with store.reader(LIVE) as read:
            document = explain.explain(read, fleet.at, "gpu-001", headers)
            return document, {row[0] for row in read.execute(made).fetchall()}

    sharing, tables = said()
    assert tables == {f"{name}_now" for name in SHARED}
    monkeypatch.setattr(explain, "shared", lambda names, as_of: iter(()))
    plain, tables = said()
    assert tables == set()
    assert sharing == plain
    assert "gpu_missing" in str(sharing["items"])


def test_rules_go_on_where_nothing_can_be_shared(
    store: Store, fleet: "Fleet", monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(names: Iterable[str], _as_of: datetime) -> Iterator[str]:
        yield from (f"CREATE TEMP TABLE {name}_now AS SELECT error('no') AS node" for name in names)

    monkeypatch.setattr(judging, "shared", broken)
    node = fleet.add("gpu-001")
    judge = Judge(
        store, JudgeSettings(), rules=[rule for rule in load_rules() if rule.name in ("gpu_missing", "xid")]
    )
    (report,) = fleet.run(5, judge)
    assert [run.status for run in report.runs] == ["ok", "ok"]
    assert fleet.find("gpu_missing", node.cards[0].entity)[:2] == ("ok", "present")


def test_two_threads_say_what_one_says(
    store: Store, fleet: "Fleet", judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = fleet.add("gpu-001").cards
    fleet.add("gpu-002")
    fleet.run(60, judge)
    cards[1].state, cards[2].listed, cards[4].util = "lost", False, None
    fleet.run(5)
    due = [rule for rule in load_rules() if not judge.unmade(rule.name)]
    monkeypatch.setattr(judging, "WORTH_TWO_S", 0.0)
    halves = judge._halves(due)
    asked = judge._ask_all(due, fleet.at)
    monkeypatch.setattr(judging, "WORTH_TWO_S", 1e9)
    alone = judge._ask_all(due, fleet.at)

    assert len(halves) == min(2, len(os.sched_getaffinity(0)))
    assert sorted(rule.name for half in halves for rule in half) == sorted(rule.name for rule in due)
    series = {"bandwidth_regression", "bandwidth_regression_fleet", "bandwidth_regression_host"}
    assert any(series <= {rule.name for rule in half} for half in halves)
    assert [one.run.rule for one in asked] == [rule.name for rule in due]
    assert {one.run.status for one in asked} == {"ok"}
    assert [(one.run.counts, one.verdicts, one.gone) for one in asked] == [
        (one.run.counts, one.verdicts, one.gone) for one in alone
    ]
    assert any(one.verdicts for one in asked)


def test_what_goes_wrong_in_one_thread_ends_the_pass(
    store: Store, fleet: "Fleet", judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.add("gpu-001")
    fleet.run(10, judge)
    monkeypatch.setattr(judging, "WORTH_TWO_S", 0.0)
    fleet.run(5)
    with monkeypatch.context() as broken:

        def share(*_: object) -> None:
            raise StoreBroken("no space left")

        broken.setattr(judge, "_share", share)
        with pytest.raises(StoreBroken, match="no space left"):
            judge.run_pass(fleet.at)
    report = judge.run_pass(fleet.at)
    assert {run.status for run in report.runs if run.rule == "gpu_missing"} == {"ok"}


def test_limits_are_compiled_anew_only_for_other_nodes_or_models(
    store: Store, fleet: "Fleet", monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[set[tuple[str, str]]] = []

    def spy(write: Any, rules: Any, settings: Any, pairs: set[tuple[str, str]]) -> None:
        compiled.append(pairs)
        compile_limits(write, rules, settings, pairs)

    monkeypatch.setattr(judging, "compile_limits", spy)
    fleet.add("gpu-001")
    judge = Judge(store, JudgeSettings())
    fleet.run(5, judge)
    with store.transaction() as write:
        write.execute(
            "INSERT INTO live.inventory BY NAME SELECT * REPLACE ('port:new' AS entity, 'port' AS kind, "
            "NULL AS uuid, valid_from + INTERVAL 1 SECOND AS valid_from) FROM live.inventory "
            "WHERE kind = 'gpu' LIMIT 1"
        )
    fleet.run(5, judge)
    assert len(compiled) == 1, "a port changes no limit"
    fleet.add("gpu-002")
    fleet.run(5, judge)
    assert {node for node, _ in compiled[-1]} == {"gpu-001", "gpu-002"}
    judge._version = -1  # as after the store was opened again, perhaps empty
    fleet.run(5, judge)
    assert compiled[-1] == compiled[-2]


def _due(rule: str, phase: timedelta, at_s: float) -> bool:
    """Whether a pass at this second runs the rule, the pass before it having been one interval earlier."""
    every, off = POLICIES[rule].every_s, phase.total_seconds()
    return (at_s - off) // every != (at_s - PASS_S - off) // every


def test_no_pass_has_much_more_to_do_than_another() -> None:
    turns = phases(POLICIES, PASS_S)
    loads = [
        sum(POLICIES[rule].weight for rule, phase in turns.items() if _due(rule, phase, number * PASS_S))
        for number in range(1, 121)
    ]
    mean = sum(loads) / len(loads)
    assert max(loads) <= 1.25 * mean
    assert all(
        timedelta(0) <= phase < timedelta(seconds=POLICIES[rule].every_s) for rule, phase in turns.items()
    )


def test_turns_depend_on_the_rules_alone() -> None:
    """A restart and a replay run each rule at the times at which it ran before."""
    other_order = dict(sorted(POLICIES.items(), reverse=True))
    assert phases(other_order, PASS_S) == phases(POLICIES, PASS_S)
    assert phases(POLICIES, 3600.0) == dict.fromkeys(POLICIES, timedelta(0)), "a pass an hour runs them all"
