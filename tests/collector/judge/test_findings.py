"""Hysteresis: what counts is distinct evidence, and a restart forgets nothing."""

from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet_collector import findings
from gpufleet_collector.findings import Finding, Policy, Verdict
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.rules import Need, load_rules, parse_rule
from gpufleet_collector.store import LIVE, Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

T0 = datetime(2026, 3, 1, 12, 0, 0)

HEADER = """/*
title = "Made up"
every = "10s"
for = "{need}"
runbook = "made_up"
{more}
*/
create or replace macro find_made_up(as_of) as table select * from said_of_it where ts = as_of;
"""


def policy(need: str = "3 of 4", **more: str) -> Policy:
    text = HEADER.format(need=need, more="\n".join(f"{key} = {value}" for key, value in more.items()))
    return Policy.of(parse_rule("made_up", text), JudgeSettings())


def said(word: str, second: float, code: str = "slow") -> Verdict:
    return Verdict("n", "gpu:G", word, code, 1.0, 2.0, "MHz", T0 + timedelta(seconds=second), "because", "{}")


def play(
    rule: Policy, samples: list[tuple[str, float]], code: str = "slow"
) -> tuple[Finding | None, list[str]]:
    """What a judge keeps of one entity after these (verdict, second)."""
    finding: Finding | None = None
    changes = []
    for word, second in samples:
        now = T0 + timedelta(seconds=second)
        if finding is None:
            if word in findings.BAD:
                finding, change = findings.begin(rule, said(word, second, code), now)
                changes.append(change)
            continue
        changes.append(findings.step(rule, finding, said(word, second, code), now))
        if changes[-1] in ("dropped", "resolved"):
            finding = None
    return finding, changes


def test_one_bad_sample_seen_by_a_hundred_passes_raises_nothing() -> None:
    finding, changes = play(policy("2 of 2"), [("crit", 0)] * 100)
    assert finding is not None
    assert (finding.state, changes.count("fired"), len(finding.evidence)) == ("pending", 0, 1)


def test_k_of_n_with_clean_samples_between() -> None:
    finding, changes = play(policy("3 of 4"), [("warn", 0), ("ok", 1), ("warn", 2), ("warn", 3)])
    assert finding is not None
    assert finding.state == "firing"
    assert changes == ["began", "seen", "seen", "fired"]


def test_too_far_apart_does_not_fire() -> None:
    finding, _ = play(policy("2 of 2"), [("warn", 0), ("ok", 1), ("warn", 2), ("ok", 3), ("warn", 4)])
    assert finding is not None
    assert finding.state == "pending"


def test_pending_without_bad_samples_is_forgotten() -> None:
    finding, changes = play(policy("3 of 4"), [("warn", 0), *(("ok", n) for n in range(1, 6))])
    assert finding is None
    assert changes[-1] == "dropped"


@pytest.mark.parametrize("neutral", ["n/a", "unknown"])
def test_neutral_verdicts_are_no_evidence(neutral: str) -> None:
    finding, _ = play(policy("2 of 2"), [("warn", 0), (neutral, 1), (neutral, 2), ("warn", 3)])
    assert finding is not None
    assert finding.state == "firing"
    finding, _ = play(
        policy("1 of 1", clear_after='"5s"'), [("warn", 0), *((neutral, n) for n in range(1, 999))]
    )
    assert finding is not None
    assert finding.state == "firing", "idle or silent is not clean"


def test_severity_is_what_k_samples_reached() -> None:
    finding, _ = play(policy("2 of 3"), [("crit", 0), ("warn", 1)])
    assert finding is not None
    assert (finding.state, finding.verdict) == ("firing", "warn"), "a crit counts as a warn"
    finding, changes = play(policy("2 of 3"), [("crit", 0), ("warn", 1), ("crit", 2), ("warn", 3)])
    assert finding is not None
    assert finding.verdict == "crit", "and stays the worst it was"
    assert changes.count("worse") == 1


def test_header_caps_severity() -> None:
    finding, _ = play(policy("1 of 1", max_severity='"warn"'), [("crit", 0)])
    assert finding is not None
    assert finding.verdict == "warn"


def test_min_duration() -> None:
    rule = policy("2 of 2", min_duration='"60s"')
    finding, _ = play(rule, [("warn", 0), ("warn", 10), ("warn", 50)])
    assert finding is not None
    assert finding.state == "pending"
    finding, _ = play(rule, [("warn", 0), ("warn", 10), ("warn", 60)])
    assert finding is not None
    assert finding.state == "firing"


def test_clearing_takes_k_clean_samples_and_clear_after() -> None:
    rule = policy("2 of 2", clear_after='"60s"')
    bad = [("warn", 0.0), ("warn", 1.0)]
    finding, _ = play(rule, [*bad, ("ok", 2), ("ok", 61)])
    assert finding is not None
    assert finding.state == "recovering"
    finding, changes = play(rule, [*bad, ("ok", 2), ("ok", 62)])
    assert finding is None
    assert changes[-2:] == ["recovering", "resolved"]
    finding, changes = play(rule, [*bad, ("ok", 2), ("warn", 30), ("ok", 40), ("ok", 62)])
    assert finding is not None
    assert (finding.state, "relapsed" in changes) == ("recovering", True), "one bad sample begins it anew"


def test_latch_never_clears_by_itself() -> None:
    rule = policy("1 of 1", latch="true")
    finding, _ = play(rule, [("crit", 0), *(("ok", n) for n in range(1, 500))])
    assert finding is not None
    assert finding.state == "recovering"


def test_late_evidence_does_not_count() -> None:
    finding, _ = play(policy("2 of 2"), [("warn", 10), ("warn", 5), ("warn", 10)])
    assert finding is not None
    assert finding.state == "pending"


def test_codes_may_need_less() -> None:
    rule = replace(policy("3 of 4"), code_needs={"brake": Need(2, 2)})
    finding, _ = play(rule, [("warn", 0), ("warn", 1)], code="brake")
    assert finding is not None
    assert finding.state == "firing"
    finding, _ = play(rule, [("warn", 0), ("warn", 1)], code="slow")
    assert finding is not None
    assert finding.state == "pending"


# --- a judge over a rule whose verdicts are scripted, with and without restarts

ENTITIES = ("gpu:A", "gpu:B")
WORDS = st.sampled_from(["ok", "ok", "warn", "crit", "n/a", "unknown"])
SCRIPT = st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=25)


def run_judge(script: list[tuple[str, str, bool]], restarts: set[int]) -> list[tuple[object, ...]]:
    store = Store.open(None)
    with store.transaction() as write:
        write.execute(
            "CREATE TABLE live.said_of_it (ts TIMESTAMP, node VARCHAR, entity VARCHAR, verdict VARCHAR, "
            "code VARCHAR, observed DOUBLE, expected DOUBLE, unit VARCHAR, evidence_at TIMESTAMP, "
            "reason VARCHAR, detail JSON)"
        )
    text = HEADER.format(need="2 of 3", more='clear_after = "20s"').replace(
        "select *", "select * exclude (ts)"
    )
    rule = parse_rule("made_up", text)

    def judge() -> Judge:
        return Judge(store, JudgeSettings(), rules=[rule])

    running = judge()
    at = evidence = T0
    for number, (*words, fresh) in enumerate(script):
        at += timedelta(seconds=10)
        evidence = at if fresh else evidence
        with store.transaction() as write:
            for entity, word in zip(ENTITIES, words, strict=True):
                write.execute(
                    "INSERT INTO live.said_of_it VALUES (?, 'n', ?, ?, 'slow', 1, 2, 'MHz', ?, 'r', '{}')",
                    [at, entity, word, evidence],
                )
        if number in restarts:
            running = judge()
        running.run_pass(at)
    with store.reader() as read:
        stored = read.execute(
            "SELECT rule, node, entity, state, verdict, code, began_at, fired_at, recovering_at, "
            "resolved_at, cause, flaps, flapping, incident FROM live.finding WHERE state <> 'pending' "
            "UNION ALL "
            "SELECT 'incident', node, entity, state, severity, title, opened_at, NULL, NULL, resolved_at, "
            "cause, NULL, NULL, number FROM live.incident UNION ALL "
            "SELECT 'log', what, text, '', '', '', logged_at, NULL, NULL, NULL, NULL, NULL, NULL, number "
            "FROM live.incident_log ORDER BY ALL"
        ).fetchall()
    store.close()
    return stored


@settings(max_examples=8, deadline=None)
@given(SCRIPT, st.sets(st.integers(0, 24)))
def test_a_judge_with_restarts_is_the_judge_without(
    script: list[tuple[str, str, bool]], restarts: set[int]
) -> None:
    assert run_judge(script, restarts) == run_judge(script, set())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ok", "warn", "crit", "n/a", "unknown"]), st.integers(0, 60)), max_size=60
    ),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_firing_means_k_distinct_bad_samples(samples: list[tuple[str, int]], k: int, more: int) -> None:
    """Whatever comes, in any order: it fires only on k distinct bad times, clears only on a clean one."""
    rule = policy(f"{k} of {k + more}")
    ordered = [(word, float(second)) for word, second in samples]
    _, changes = play(rule, ordered)
    bad = {second for word, second in ordered if word in findings.BAD}
    if "fired" in changes:
        assert len(bad) >= k
    if "resolved" in changes:
        assert any(word == "ok" for word, _ in ordered)


def test_restart_in_the_middle_keeps_incident_start_and_history() -> None:
    script = [("crit", "ok", True)] * 3 + [("ok", "ok", True)] + [("warn", "ok", True)] * 2
    for restart in (1, 2, 4):
        assert run_judge(script, {restart}) == run_judge(script, set())


# --- flapping

FIRE, CLEAR = [("crit", "ok", True)] * 2, [("ok", "ok", True)] * 4


def told(stored: list[tuple[object, ...]], what: str) -> list[object]:
    """The texts of an incident's log entries of one kind."""
    return [row[2] for row in stored if row[:2] == ("log", what)]


def test_the_third_firing_in_an_hour_is_flapping_and_stays_one_open_incident() -> None:
    stored = run_judge((FIRE + CLEAR) * 4, set())
    found = [(row[3], row[12]) for row in stored if row[0] == "made_up"]
    assert found == [("recovering", True), ("resolved", False), ("resolved", False)]
    assert [row[3] for row in stored if row[0] == "incident"] == ["open"]
    assert len(told(stored, "opened")) == 1
    assert len(told(stored, "reopened")) == 2, "the fourth time it is still open"


def test_two_firings_are_not_flapping() -> None:
    stored = run_judge((FIRE + CLEAR) * 2, set())
    assert [(row[3], row[12]) for row in stored if row[0] == "made_up"] == [("resolved", False)] * 2


@pytest.mark.parametrize("restart", [6, 7, 12, 13, 15])
def test_a_restart_forgets_no_flaps(restart: int) -> None:
    script = (FIRE + CLEAR) * 3
    assert run_judge(script, {restart}) == run_judge(script, set())


def test_flapping_ends_after_a_clean_hour_and_old_firings_do_not_count() -> None:
    rule = policy("1 of 1")

    def episodes(seconds: list[float]) -> Finding:
        flaps: tuple[datetime, ...] = ()
        for second in seconds:
            finding, _ = findings.begin(rule, said("warn", second), T0 + timedelta(seconds=second), flaps)
            flaps = finding.flaps
        return finding

    assert not episodes([0, 1200, 3700]).flapping, "the first is more than an hour ago"
    finding = episodes([0, 1200, 2400])
    assert finding.flapping
    for second, state in (
        (2410, "recovering"),
        (3600, "recovering"),
        (6009, "recovering"),
        (6010, "resolved"),
    ):
        findings.step(rule, finding, said("ok", second), T0 + timedelta(seconds=second))
        assert finding.state == state


def test_a_store_of_before_flapping_opens(tmp_path: Path) -> None:
    path = tmp_path / "fleet.duckdb"
    with closing(Store.open(path)) as store, store.transaction() as write:
        write.execute("ALTER TABLE live.finding DROP COLUMN flaps")
        write.execute("ALTER TABLE live.finding DROP COLUMN flapping")
        write.execute(
            "INSERT INTO live.finding (id, rule, node, entity, state, verdict, code, reason, evidence, "
            "began_at, last_evidence_at, updated_at) "
            "VALUES (1, 'gpu_missing', 'n', 'gpu:G', 'firing', 'crit', 'c', 'r', '[]', ?, ?, ?)",
            [T0, T0, T0],
        )
    with closing(Store.open(path)) as store:
        Judge(store, JudgeSettings())
        with store.reader(LIVE) as read:
            [finding] = findings.load(read)
            assert read.execute("SELECT flags FROM nodes_at(?, '2 minutes')", [T0]).fetchall() == []
    assert (finding.flaps, finding.flapping) == ((), False)


def test_flapping_is_shown_on_its_card(fleet: "Fleet", store: Store) -> None:
    well, card = fleet.add("gpu-001", gpus=2, health=True).cards
    rules = [rule for rule in load_rules() if rule.name == "remap_failed"]
    judge = Judge(store, JudgeSettings(), rules=rules)
    for _ in range(3):
        card.health["remap_pending"] = True
        fleet.run(60, judge, every=30)
        card.health["remap_pending"] = False
        fleet.run(60, judge, every=30)
    shown = (
        "SELECT entity, state, array_to_string(flags, ' ') FROM cards_at(?, '2 minutes') ORDER BY gpu_index"
    )
    assert fleet.sql(shown, fleet.at) == [
        (well.entity, "ok", ""),
        (card.entity, "degraded", "flapping"),
    ]
    assert [row[5] for row in fleet.incidents()] == ["warn"]
