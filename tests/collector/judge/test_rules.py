"""Rule files, their headers, their limits; a rule in trouble stops no other."""

import logging
import re
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pytest

from gpufleet.config import ConfigError, parse
from gpufleet.metric import Type
from gpufleet_agent.probes import PROBES
from gpufleet_collector import limits
from gpufleet_collector.findings import Policy
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeOptions, JudgeSettings, Limit, RuleOverride, Scope
from gpufleet_collector.rules import (
    DESCRIBED,
    GPU_COLUMNS,
    NO_PROBE,
    WAITS,
    install,
    load_rules,
    parse_rule,
    seconds,
)
from gpufleet_collector.standard import STANDARD
from gpufleet_collector.store import LIVE, Column, Store

if TYPE_CHECKING:
    from tests.collector.judge.conftest import Fleet

RULES = load_rules()
RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"
TEN = ["node", "entity", "verdict", "code", "observed", "expected", "unit", "evidence_at", "reason", "detail"]
TYPES = ["VARCHAR"] * 4 + ["DOUBLE"] * 2 + ["VARCHAR", "TIMESTAMP", "VARCHAR", "JSON"]

GOOD = """/*
title = "Title"
every = "10s"
for = "1 of 2"
runbook = "page"
*/
create or replace macro find_good(as_of) as table select 1;
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_its_runbook_and_passes_explain_on_an_empty_schema(
    rule: "object", store: Store
) -> None:
    assert type(rule) is type(RULES[0])
    assert (RUNBOOKS / f"{rule.header.runbook}.md").is_file()
    Judge(store, JudgeSettings(), rules=[rule])
    with store.reader(LIVE) as read:
        query = f"SELECT * FROM find_{rule.name}(TIMESTAMP '2026-03-01 12:00:00')"
        assert read.execute(f"EXPLAIN {query}").fetchall()
        described = read.execute(f"DESCRIBE {query}").fetchall()
        assert read.execute(query).fetchall() == []
    assert [row[0] for row in described] == TEN
    assert [row[1] for row in described] == TYPES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_name_tables_without_schema(rule: "object") -> None:
    assert type(rule) is type(RULES[0])
    code = re.sub(r"/\*.*?\*/|--[^\n]*", "", rule.sql, flags=re.DOTALL)
    assert not re.search(r"\b(live|main|rules)\.", code)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('runbook = "page"', "", "missing required field `runbook`"),
        ('runbook = "page"', 'runbook = ""', "runbook is empty"),
        ('every = "10s"', 'evry = "10s"', "unknown field `evry`"),
        ('every = "10s"', 'every = "ten"', "'ten' is not a duration"),
        ('for = "1 of 2"', 'for = "3 of 2"', "'3 of 2' is not"),
        ('for = "1 of 2"', 'for = "1 of 2"\nscope = "rack"', "scope = 'rack' is none of gpu, node"),
        ('for = "1 of 2"', 'for = "1 of 2"\nmax_severity = "info"', "is none of warn, crit"),
        ('title = "Title"', "title =", "header"),
        ("/*", "--", "must begin with"),
        ("find_good", "find_bad", "does not make find_good(as_of)"),
    ],
)
def test_a_wrong_header_is_one_clear_error(before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rule("good", GOOD.replace(before, after))
    assert message in str(caught.value)
    assert str(caught.value).startswith("rule good: ")


def test_durations() -> None:
    assert [seconds(text) for text in ("90s", "5m", "2h", "1d", "1.5s")] == [90, 300, 7200, 86400, 1.5]


def test_a_rule_without_its_probe_is_not_applicable_until_it_comes(fleet: "Fleet") -> None:
    bare = Store.open(None)
    judge = Judge(bare, JudgeSettings())
    at = fleet.at
    judge.run_pass(at)
    with bare.reader() as read:
        status = dict(read.execute("SELECT rule, status FROM live.rule").fetchall())
    assert status["gpu_missing"] == status["gpu_downclocked"] == NO_PROBE
    assert status["agent_silent"] == status["clock_skew"] == "ok"
    with bare.reader(LIVE) as read:
        assert read.execute(f"SELECT * FROM cards_at(TIMESTAMP '{at}', '2 minutes')").fetchall() == []
    with bare.transaction() as write:
        for probe in ("gpu", "pci", "agent", "host", "bench", "port"):
            bare.ensure_probe(write, probe, _columns(fleet.store, probe))
    judge.run_pass(at + timedelta(minutes=10))  # the rarest run so often
    with bare.reader() as read:
        status = dict(read.execute("SELECT rule, status FROM live.rule").fetchall())
    assert {rule for rule, said in status.items() if said == NO_PROBE} == {
        "data_starved",
        "dimm_errors",
        "disk_full",
        "disk_slow",
        "driver_mismatch",
        "ecc_corrected",
        "ecc_uncorrectable",
        "mount_hung",
        "nvlink_down",
        "nvlink_errors",
        "pcie_errors",
        "power_limit",
        "recovery_action",
        "remap_failed",
        "retired_pages",
        "temperature_margin",
    }, "agents of an earlier version read none of what these judge"
    with bare.transaction() as write:
        for probe in PROBES:
            bare.ensure_probe(write, probe, _columns(fleet.store, probe))
    judge.run_pass(at + timedelta(minutes=20))
    with bare.reader() as read:
        status = dict(read.execute("SELECT rule, status FROM live.rule").fetchall())
    assert set(status.values()) == {"ok"}
    bare.close()


def test_a_fresh_collector_says_calmly_and_once_what_it_waits_for(
    fleet: "Fleet", caplog: pytest.LogCaptureFixture
) -> None:
    assert {*PROBES, "agent", "bench"} == DESCRIBED, "what agents describe"
    caplog.set_level(logging.INFO)
    with closing(Store.open(None)) as bare:
        judge = Judge(bare, JudgeSettings())
        for minute in range(3):
            judge.run_pass(fleet.at + timedelta(minutes=minute))
        with bare.reader() as read:
            [(said,)] = read.execute("SELECT error FROM live.rule WHERE rule = 'gpu_missing'").fetchall()
    assert said == "waits for probe agent, gpu, pci: no agent has described it yet"
    lines = [record for record in caplog.records if record.getMessage().startswith("rule ")]
    assert [line.getMessage() for line in lines].count(f"rule gpu_missing {said}") == 1
    assert {line.levelname for line in lines} == {"INFO"}
    assert "Catalog" not in caplog.text


def test_a_rule_waits_for_a_probe_when_the_engine_would_refuse_it_and_only_then() -> None:
    own = re.compile(r"(?:\bwith|,)\s+(?:recursive\s+)?(\w+)\s+as\s+(?:(?:not\s+)?materialized\s+)?\(", re.I)
    with closing(Store.open(None)) as empty:
        status = install(empty, RULES, [limits.limits_view(rule) for rule in RULES])
        refused = []
        for rule in RULES:
            assert not set(own.findall(rule.sql)) & DESCRIBED, "a table of its own, named like a probe's"
            try:
                with empty.transaction(), empty.reader("rules,live") as write:
                    write.execute(rule.sql)
                with empty.reader(LIVE) as read:
                    read.execute(f"DESCRIBE SELECT * FROM find_{rule.name}(TIMESTAMP '2000-01-01')")
            except duckdb.CatalogException:
                refused.append(rule.name)
    assert [name for name, error in status.items() if error.startswith(WAITS)] == refused
    assert 0 < len(refused) < len(RULES)


def test_a_rule_that_is_itself_wrong_is_a_warning(
    fleet: "Fleet", store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    rule = parse_rule("good", GOOD.replace("select 1;", "select * from nod_list;"))
    Judge(store, JudgeSettings(), rules=[rule]).run_pass(fleet.at)
    [line] = [record for record in caplog.records if record.getMessage().startswith("rule good")]
    assert line.levelname == "WARNING"
    assert "nod_list" in line.getMessage()


def _columns(store: Store, probe: str) -> list[Column]:
    with store.reader() as read:
        rows = read.execute(
            "SELECT name, type, unit, kind, help, low, high, rollup FROM live.metric "
            "WHERE probe = ? ORDER BY position",
            [probe],
        ).fetchall()
    return [Column(name, Type[kind.upper()], *rest) for name, kind, *rest in rows]


def test_a_column_that_no_agent_sends_costs_only_its_rule(fleet: "Fleet", judge: Judge) -> None:
    fleet.add("gpu-001", gpus=1).cards[0].state = "lost"
    with fleet.store.transaction() as write:
        write.execute("ALTER TABLE live.gpu RENAME COLUMN hw_brake_s_total TO something_else")
    status = install(fleet.store, RULES, [limits.limits_view(rule) for rule in RULES])
    assert [name for name, error in status.items() if error] == ["gpu_downclocked"]


def test_a_rule_that_raises_or_hangs_stops_no_other(
    fleet: "Fleet", store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    text = GOOD.replace("select 1", "{}")
    head = (
        "select 'n' as node, 'node:' as entity, {} as verdict, 'c' as code, 1::double as observed, "
        "1::double as expected, '' as unit, as_of as evidence_at, '' as reason, '{{}}'::json as detail"
    )
    bodies = {
        "raises": head.format("if(error('boom') is null, 'ok', 'ok')"),
        "endless": head.format("'ok'") + " from range(100000000000) t(i) where hash(i) = 1",
        "strange": head.format("'fine'"),
        "good": head.format("'warn'"),
    }
    rules = [
        parse_rule(name, text.replace("find_good", f"find_{name}").format(body))
        for name, body in bodies.items()
    ]
    judge = Judge(store, JudgeSettings(judge=JudgeOptions(rule_timeout="0.3s")), rules=rules)
    for _ in range(2):
        fleet.at += timedelta(seconds=10)
        report = judge.run_pass(fleet.at)
    assert {run.rule: run.status for run in report.runs} == {
        "raises": "failed",
        "endless": "too slow",
        "strange": "failed",
        "good": "ok",
    }
    assert fleet.findings() == [("n", "node:", "firing", "warn", "c")]
    assert fleet.sql("SELECT status, error FROM rule WHERE rule = 'endless'") == [
        ("too slow", "stopped after 0.3 s")
    ]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 3, "once, not at every pass"


def test_limits_are_layered_and_name_their_source(fleet: "Fleet", store: Store) -> None:
    def warn(value: float, source: str) -> limits.Limits:
        return {"gpu_downclocked": {"warn_ratio": Limit(value=value, source=source)}}

    settings = JudgeSettings(
        limit={"gpu_downclocked": {"crit_ratio": Limit(value=0.5, source="site")}},
        model={
            "H100": Scope(limit=warn(0.91, "h100")),
            "NVIDIA H100 80GB": Scope(limit=warn(0.92, "exact")),
            "L4": Scope(limit=warn(0.1, "l4")),
        },
        node={"gpu-002": Scope(limit=warn(0.9, "ann"))},
    )
    fleet.add("gpu-001", gpus=1)
    fleet.add("gpu-002", gpus=1)
    judge = Judge(store, settings)
    judge.compile(fleet.at)
    rows = fleet.sql(
        "SELECT node, value, layer, source FROM limits WHERE rule = 'gpu_downclocked' "
        "AND name = 'warn_ratio' AND model <> '' ORDER BY node"
    )
    assert rows == [("gpu-001", 0.92, "model", "exact"), ("gpu-002", 0.9, "node", "ann")]
    rows = fleet.sql(
        "SELECT model, warn_ratio, crit_ratio FROM limits_gpu_downclocked "
        "WHERE node = 'gpu-001' ORDER BY model"
    )
    assert rows == [("", 0.93, 0.5), ("NVIDIA H100 80GB HBM3", 0.92, 0.5)]
    assert limits.layered(RULES[0], settings, "x", "NVIDIA L40S").keys() == RULES[0].header.limits.keys()


def test_a_model_name_is_whole_words(fleet: "Fleet") -> None:
    [rule] = [rule for rule in RULES if rule.name == "gpu_downclocked"]
    settings = JudgeSettings(model={"L4": Scope(limit={"gpu_downclocked": {"warn_ratio": Limit(value=0.1)}})})
    assert limits.layered(rule, settings, "n", "NVIDIA L4")["warn_ratio"][0] == 0.1
    for other in ("NVIDIA L40", "NVIDIA L40S", "NVIDIA A10", ""):
        assert limits.layered(rule, settings, "n", other)["warn_ratio"][0] == 0.93


def test_a_limit_of_one_node_moves_its_verdict_only(fleet: "Fleet", store: Store) -> None:
    strict = {"gpu_downclocked": {"warn_ratio": Limit(value=0.99)}}
    one = [rule for rule in RULES if rule.name == "gpu_downclocked"]
    fleet.judge = Judge(store, JudgeSettings(node={"gpu-002": Scope(limit=strict)}), rules=one)
    cards = [fleet.add(f"gpu-00{n}").cards[0] for n in (1, 2)]
    for card in cards:
        card.clock = 0.97 * 1950
    fleet.run(120)
    assert [fleet.find("gpu_downclocked", card.entity)[0] for card in cards] == ["ok", "warn"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[limit.gpu_lost.warn_ratio]\nvalue = 1",
            "[limit.gpu_lost]: no such rule; there are agent_dropping, ",
        ),
        (
            "[limit.gpu_downclocked.warn_ration]\nvalue = 1",
            "[limit.gpu_downclocked.warn_ration]: the rule has no such limit",
        ),
        ('[model."H100".limit.nope.x]\nvalue = 1', '[model."H100".limit.nope]: no such rule'),
        (
            '[node."gpu-001".limit.gpu_missing.x]\nvalue = 1',
            '[node."gpu-001".limit.gpu_missing.x]: the rule has no such limit; it has none',
        ),
        ('[rule.nope]\nevery = "1s"', "[rule.nope]: no such rule"),
        ('[rule.gpu_missing]\nevery = "soon"', "[rule.gpu_missing] every: 'soon' is not a duration"),
        ('[rule.gpu_missing]\nevery = "0s"', "[rule.gpu_missing] every: must be above 0"),
        (
            '[rule.gpu_missing]\nclear_after = "999999999d"',
            "[rule.gpu_missing] clear_after: '999999999d' is more",
        ),
        ('[rule.gpu_missing]\nboot_grace = ""', "[rule.gpu_missing] boot_grace: '' is not a duration"),
        ('[rule.gpu_missing]\nfor = "5 of 2"', "[rule.gpu_missing] for: '5 of 2' is not"),
        ('[judge]\nwarm_up = "-1s"', "[judge] warm_up: '-1s' is not a duration"),
        ('[judge]\nrule_timeout = "0s"', "[judge] rule_timeout: must be above 0"),
        (
            "[limit.gpu_downclocked.window_s]\nvalue = nan",
            "[limit.gpu_downclocked.window_s] value: nan is not",
        ),
        ('[judge]\nevery = "0s"', "[judge] every: must be above 0"),
        ('[rule.gpu_missing]\nevry = "1s"', "unknown key rule"),
        ('[limit.gpu_downclocked.warn_ratio]\nvalue = "x"', "Expected `float`"),
    ],
)
def test_wrong_settings_are_one_line(store: Store, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Judge(store, parse(text.encode(), JudgeSettings, "collector.toml"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_site_overrides_how_a_rule_runs() -> None:
    [rule] = [rule for rule in RULES if rule.name == "gpu_downclocked"]
    assert Policy.of(rule, JudgeSettings()).code_needs.keys() == {"power_brake", "hw_thermal"}
    quick = RuleOverride(
        every="2s", for_="1 of 1", clear_after="1s", min_duration="3s", boot_grace="0s", shadow=True
    )
    policy = Policy.of(rule, JudgeSettings(rule={"gpu_downclocked": quick}))
    assert (policy.every_s, policy.need.k, policy.code_needs, policy.shadow) == (2.0, 1, {}, True)


def test_rules_run_at_their_own_pace_also_over_a_restart(fleet: "Fleet", store: Store) -> None:
    settings = JudgeSettings(rule={"clock_skew": RuleOverride(every="20s")})
    ran = []
    two = [rule for rule in RULES if rule.name in ("clock_skew", "agent_silent")]
    judge = Judge(store, settings, rules=two)
    for number in range(1, 13):
        fleet.at += timedelta(seconds=5)
        if number in (5, 6):
            judge = Judge(store, settings, rules=two)
        ran.append(any(run.rule == "clock_skew" for run in judge.run_pass(fleet.at).runs))
    assert ran == [True, False, False, True] + [False, False, False, True] * 2


def test_types_that_rules_rely_on_are_those_of_the_standard_probes(store: Store) -> None:
    assert store.tables == STANDARD, "the store of this folder was made from what agents declare"
    assert GPU_COLUMNS.items() <= STANDARD["gpu"].items()
