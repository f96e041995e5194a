"""The bench rules over a simulated fleet: rows straight into a store, judged by the real judge each hour.

Bench rules see nothing new between two rounds of runs, and evidence counts once however often it is seen: a
pass after each round gives what a pass each half minute would.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np
from tests.bench.detect.world import CARDS, LEARN_HOURS, MODELS, World

from gpufleet_agent import benches
from gpufleet_collector import baselines
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeOptions, JudgeSettings
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import LIVE, Column, Store

START = datetime(2026, 3, 1)
RULES = ("bandwidth_regression", "bandwidth_regression_host", "bandwidth_regression_fleet")
STATUS = ("", "ok", "skipped", "contaminated")


@dataclass(frozen=True, slots=True)
class Fired:
    """A finding that fired. `card` -1 = the host, `host` -1 = the fleet."""

    rule: str
    code: str
    host: int
    card: int
    hour: int


@dataclass(slots=True)
class Judged:
    """What the judge made of a world."""

    fired: list[Fired] = field(default_factory=list)
    seconds: float = 0.0
    pass_s: float = 0.0


def judge(world: World, each_day: Callable[[int, Judged], None] | None = None) -> Judged:
    """Play a world hour by hour; after each day `each_day` is told how far it is."""
    began = time.perf_counter()
    store = Store.open(None)
    _install(store, world)
    chosen = [rule for rule in load_rules() if rule.name in RULES]
    judging = Judge(store, JudgeSettings(judge=JudgeOptions(rule_timeout="10m")), rules=chosen)
    out = Judged()
    passes = []
    for hour in range(world.hours):
        if hour % 24 == 0:
            _put(store, world, hour, min(hour + 24, world.hours))
        for step in world.steps:
            if hour == step.accepted:
                _accept(store, world, step.model, _end(hour))
        if 0 < hour < LEARN_HOURS - 4:
            continue  # baselines take what is there when they look, often or late
        report = judging.run_pass(_end(hour))
        bad = [run for run in report.runs if run.status != "ok"]
        if bad or len(report.runs) != len(RULES):
            raise RuntimeError(f"hour {hour}: {[(run.rule, run.status, run.error) for run in report.runs]}")
        passes.append(report.seconds)
        out.fired += [_fired(one.rule, one.code, one.node, one.entity, hour) for one in report.fired]
        out.seconds, out.pass_s = time.perf_counter() - began, float(np.median(passes))
        if each_day and hour % 24 == 23:
            each_day(hour + 1, out)
    store.close()
    return out


def _end(hour: int) -> datetime:
    return START + timedelta(hours=hour, minutes=59)


def _fired(rule: str, code: str, node: str, entity: str, hour: int) -> Fired:
    if not node:
        return Fired(rule, code, -1, -1, hour)
    card = int(entity.rsplit("-", 1)[1]) if entity.startswith("gpu:") else -1
    return Fired(rule, code, int(node.removeprefix("n")), card, hour)


def _install(store: Store, world: World) -> None:
    columns = [
        Column(m.name, m.type, str(m.unit), m.kind.name.lower(), m.help, m.low, m.high, m.rollup)
        for m in benches.METRICS
    ]
    ids = range(world.hosts * CARDS)
    models = [MODELS[world.model[number // CARDS]] for number in ids]
    day = START - timedelta(days=1)
    with store.transaction() as write:
        store.ensure_probe(write, "bench", columns)
        write.execute(
            "CREATE TEMP TABLE card AS SELECT unnest(?::INT[]) AS id, unnest(?::VARCHAR[]) AS model, "
            "unnest(?::VARCHAR[]) AS link, unnest(?::DOUBLE[]) AS typical",
            [list(ids), [m.name for m in models], [m.link for m in models], [m.typical for m in models]],
        )
        write.execute(
            f"ALTER TABLE card ADD COLUMN node VARCHAR; ALTER TABLE card ADD COLUMN uuid VARCHAR; "
            f"UPDATE card SET node = format('n{{:04d}}', id // {CARDS}), "
            f"uuid = format('GPU-{{:04d}}-{{}}', id // {CARDS}, id % {CARDS})"
        )
        write.execute(
            "INSERT INTO live.node SELECT DISTINCT node, node, node, 'b', 's', '1', '', $day, $day FROM card",
            {"day": day},
        )
        write.execute(
            "INSERT INTO live.inventory SELECT node, 'gpu:' || uuid, 'gpu', uuid, uuid, NULL, model, NULL, "
            f"id % {CARDS}, '{{}}', $day, NULL FROM card",
            {"day": day},
        )
        write.execute(
            "INSERT INTO live.expected SELECT node, uuid, uuid, NULL, model, NULL, 'accepted', 'bench', "
            "$day, '' FROM card",
            {"day": day},
        )


def _put(store: Store, world: World, first: int, end: int) -> None:
    """A day of runs; the judge sees each when its time has come."""
    status = world.status[:, :, first:end]
    host, card, hour = np.nonzero(status)
    value = world.value[:, :, first:end][host, card, hour]
    second = (first + hour) * 3600 + (host * 37 % 1800) + card * 120 + world.offset_s[host] + 120
    with store.transaction() as write:
        write.execute(
            "CREATE OR REPLACE TEMP TABLE run AS SELECT unnest(?::INT[]) AS id, "
            "unnest(?::DOUBLE[]) AS second, unnest(?::DOUBLE[]) AS loss, "
            "unnest(?::VARCHAR[]) AS status, unnest(?::BOOLEAN[]) AS newer",
            [
                (host * CARDS + card).tolist(), second.tolist(), value.tolist(),
                [STATUS[one] for one in status[host, card, hour]],
                world.newer[host, first + hour].tolist(),
            ],
        )  # fmt: skip
        write.execute(
            "INSERT INTO live.bench BY NAME SELECT $start + to_microseconds((second * 1e6)::BIGINT) AS ts, "
            "$start + to_seconds((second // 3600 * 3600 + 3480)) AS received_at, node, 'b' AS boot_id, "
            "'gpu:' || uuid AS entity, '' AS peer, 'h2d' AS bench, '1' AS version, "
            "'copied_once' AS convention, 'sim' AS params_hash, "
            "CASE WHEN status = 'ok' THEN typical * exp(loss) END AS value, 'GB/s' AS unit, "
            "status, '' AS reason, 5 AS repeats, 0.001 AS spread, 0.2 AS seconds, 0.2 AS gpu_seconds, link, "
            "if(newer, '590', '580') AS driver FROM run JOIN card USING (id)",
            {"start": START},
        )


def _accept(store: Store, world: World, model: int, at: datetime) -> None:
    """A person takes what the new driver gives as the baseline of that model."""
    nodes: Sequence[str] = [f"n{host:04}" for host in np.flatnonzero(world.model == model)]
    if not nodes:
        return
    with store.transaction() as write, store.reader(LIVE) as read:
        baselines.put(write, baselines.seen_now(read, nodes, "bench", "new driver", at))
