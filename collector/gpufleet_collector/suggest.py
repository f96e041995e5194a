"""The limits that hold, and limits that the fleet's own data suggest. Changes nothing.

A suggestion comes from what a rule measured (`observed`) on entities that it found well, at some forty
moments of the last days: the thousandth part nearest to trouble, and as far again as from the hundredth.
"""

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

import duckdb
import numpy as np

from gpufleet_collector import sandbox
from gpufleet_collector.documents import Document, NotFound, Row, document, iso, rows
from gpufleet_collector.findings import Policy
from gpufleet_collector.rules import Rule, one_line, reads

MOMENTS = 40
MAX_SECONDS = 20.0
SINCE_S = 7 * 86400.0
MIN_SAMPLES = 50
"""Fewer say nothing of the thousandth part."""
ENOUGH_S = 0.95 * 86400
"""A shorter history has not seen night and day, or an idle fleet and a busy one."""
ENOUGH_SAMPLES = 1000
"""Of fewer the thousandth part is the one that lies furthest out."""
ENOUGH_ENTITIES = 8
"""Fewer are one host."""

Samples = Sequence[tuple[str, str, str, float, float | None, datetime | None]]
"""node, entity, verdict, observed, expected, evidence_at."""


def limits(
    read: duckdb.DuckDBPyConnection, now: datetime, rules: Mapping[str, Rule], rule: str, node: str
) -> Document:
    """Compiled limits, one item per rule, name, value and layer.

    Raises:
        NotFound: There is no such rule or node.
    """
    _known(rules, rule)
    if (
        node
        and not read.execute("SELECT 1 FROM node_list(?::TIMESTAMP) WHERE node = ?", [now, node]).fetchone()
    ):
        raise NotFound(f"no node {node!r}\nsee fleet node")
    found = rows(
        read,
        """
        SELECT rule, name, value, layer, source,
               CASE WHEN layer = 'node' OR $node <> '' THEN node END AS node,
               CASE WHEN layer = 'model' THEN model END AS model,
               count(DISTINCT node) AS nodes
        FROM limits WHERE ($rule = '' OR rule = $rule) AND ($node = '' OR node = $node)
        GROUP BY ALL ORDER BY rule, name, layer, node, model
        """,
        {"rule": rule, "node": node},
    )
    defaults = {name: one.header.limits for name, one in rules.items()}
    for row in found:
        own = defaults.get(str(row["rule"]), {}).get(str(row["name"]))
        row["default"] = own.value if own else None
    return document("LimitList", now, found)


def suggest(
    read: duckdb.DuckDBPyConnection,
    now: datetime,
    rules: Mapping[str, Rule],
    policies: Mapping[str, Policy],
    rule: str,
    since_s: float,
    tables: Collection[str],
) -> Document:
    """What `rule` measured, and which limits would fit that.

    Raises:
        NotFound: There is no such rule.
    """
    if not rule:
        raise NotFound("suggest needs a rule\nwrite fleet limits suggest RULE")
    _known(rules, rule)
    since_s = since_s if math.isfinite(since_s) and since_s > 0 else SINCE_S
    begin = _begins(read, now - timedelta(seconds=min(since_s, 3650 * 86400)), rules[rule], tables)
    samples, unit, problem, asked = _samples(read, now, rules[rule], begin)
    well = [one for one in samples if one[2] == "ok"]
    items: list[Row] = []
    named = _named(read, rule)
    for name, value in sorted(named.items()):
        series = _series(name, value, samples)
        if series is not None:
            item = _suggestion(name, value, series, samples, policies[rule].need.k)
            item["caution"] = None if item["suggested"] is None else _caution(well, (now - begin) / MOMENTS)
            items.append(item)
    note = problem or _note(well, items)
    return document(
        "LimitSuggestion", now, items,
        rule=rule, since=iso(begin), moments=asked, unit=unit,
        samples=len(samples), entities=len({one[:2] for one in samples}),
        observed=_spread(np.array([one[3] for one in well])), note=note,
    )  # fmt: skip


def _known(rules: Mapping[str, Rule], rule: str) -> None:
    if rule and rule not in rules:
        raise NotFound(f"no rule {rule!r:.80}\nthere are {', '.join(sorted(rules))}")


def _named(read: duckdb.DuckDBPyConnection, rule: str) -> dict[str, float]:
    """The limit that most nodes have, by name."""
    found = read.execute(
        "SELECT name, mode(value ORDER BY value) FROM limits WHERE rule = ? GROUP BY name", [rule]
    ).fetchall()
    return {str(name): float(value) for name, value in found}


def _begins(
    read: duckdb.DuckDBPyConnection, since: datetime, rule: Rule, tables: Collection[str]
) -> datetime:
    """Where the rows begin that the rule reads."""
    oldest: list[datetime] = []
    for table in sorted(reads(rule).words & set(tables)):
        row = read.execute(f'SELECT min(ts) FROM "{table}" WHERE ts >= ?', [since]).fetchone()
        oldest += [row[0]] if row and row[0] is not None else []
    return min(oldest, default=since)


def _samples(
    read: duckdb.DuckDBPyConnection, now: datetime, rule: Rule, begin: datetime
) -> tuple[Samples, str | None, str, int]:
    """What the rule measured at moments spread over the time, without entities in trouble of another kind."""
    found: dict[
        tuple[str, str, str | None, object], tuple[str, str, str, float, float | None, datetime | None]
    ] = {}
    units: Counter[str | None] = Counter()
    ends, asked = time.monotonic() + MAX_SECONDS, 0

    def alike() -> tuple[Samples, str | None]:
        """Those in the unit of most: a rule may measure clocks of some cards and seconds of others."""
        most = units.most_common(1)[0][0] if units else None
        return [sample for key, sample in found.items() if key[2] == most], most

    for n in range(MOMENTS):
        left = ends - time.monotonic()
        if left <= 0:
            return *alike(), f"stopped after {asked} of {MOMENTS} moments: time", asked
        at = now - (now - begin) * n / MOMENTS
        try:
            with sandbox.watch(read, left, None):
                said = read.execute(
                    f"""
                    SELECT node, entity, verdict, observed, expected, unit, evidence_at
                    FROM find_{rule.name}($at)
                    WHERE verdict IN ('ok', 'warn', 'crit') AND isfinite(observed)
                      AND (node, entity) NOT IN (
                          SELECT (node, entity) FROM findings_at($at) WHERE rule <> $rule)
                    """,
                    {"at": at, "rule": rule.name},
                ).fetchall()
        except duckdb.InterruptException:
            return *alike(), f"stopped after {asked} of {MOMENTS} moments: time", asked
        except (duckdb.CatalogException, duckdb.BinderException):
            return [], None, "it cannot run: no agent has sent the columns it reads", asked
        except duckdb.Error as error:
            return [], None, one_line(error), asked
        asked += 1
        for node, entity, verdict, observed, expected, unit, evidence_at in said:
            units[unit] += 1
            found[(node, entity, unit, evidence_at)] = (
                node,
                entity,
                verdict,
                observed,
                expected,
                evidence_at,
            )
    return *alike(), "", asked


def _series(name: str, value: float, samples: Samples) -> tuple[str, list[float]] | None:
    """What of a sample this limit is compared with: the measured value, or its ratio to what is expected."""
    if not samples:
        return None
    itself = sum(one[4] == value for one in samples)
    if itself >= 0.9 * len(samples):
        return "observed", [one[3] for one in samples]
    if name.endswith("_ratio") and itself == 0:
        ratios = [one[3] / one[4] if one[4] else math.nan for one in samples]
        if all(math.isfinite(ratio) for ratio in ratios):
            return "observed/expected", ratios
    return None


def _suggestion(name: str, value: float, series: tuple[str, list[float]], samples: Samples, k: int) -> Row:
    """A limit just beyond what well entities show, and who would pass it how often."""
    what, values = series
    well = np.array([v for v, one in zip(values, samples, strict=True) if one[2] == "ok"])
    low_is_bad = bool(len(well)) and float(np.median(well)) > value
    spread = _spread(well)
    suggested = None
    if len(well) >= MIN_SAMPLES:
        worst, near = (0.001, 0.01) if low_is_bad else (0.999, 0.99)
        edge, inner = float(np.quantile(well, worst)), float(np.quantile(well, near))
        suggested = _round(edge + (edge - inner))
    return {
        "name": name,
        "compares": what,
        "bad_is": "low" if low_is_bad else "high",
        "value": value,
        "suggested": suggested,
        "healthy": spread,
        "entities_over_now": _passing(values, samples, value, low_is_bad, k),
        "entities_over_suggested": None if suggested is None
        else _passing(values, samples, suggested, low_is_bad, k),
        "k": k,
    }  # fmt: skip


def _caution(well: Samples, step: timedelta) -> str | None:
    """What a suggestion has too little of; None = it has enough. `step`: between two moments."""
    times = [one[5] for one in well if one[5] is not None]
    span = max(times) - min(times) + step if times else timedelta(0)
    entities = len({one[:2] for one in well})
    short = []
    if span.total_seconds() < ENOUGH_S:
        minutes = span.total_seconds() / 60
        short.append(f"{minutes:.0f} min of history" if minutes < 120 else f"{minutes / 60:.0f} h of history")
    if entities < ENOUGH_ENTITIES:
        short.append(f"{entities} entities")
    if len(well) < ENOUGH_SAMPLES:
        short.append(f"{len(well)} samples")
    return f"made of only {', '.join(short)}" if short else None


def _passing(values: Sequence[float], samples: Samples, limit: float, low_is_bad: bool, k: int) -> int:
    """Entities beyond the limit in at least k samples."""
    counts: dict[tuple[str, str], int] = {}
    for value, one in zip(values, samples, strict=True):
        if value < limit if low_is_bad else value > limit:
            counts[one[:2]] = counts.get(one[:2], 0) + 1
    return sum(count >= k for count in counts.values())


def _spread(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Row:
    shares = {"min": 0.0, "p001": 0.001, "p01": 0.01, "p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    if not len(values):
        return {"samples": 0, **dict.fromkeys(shares)}
    return {
        "samples": len(values),
        **{name: float(np.quantile(values, share)) for name, share in shares.items()},
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _note(well: Samples, items: Sequence[Row]) -> str:
    if not well:
        return "no entity was found well with a measured value in this time"
    if not items:
        return "none of its limits is one that the measured value is compared with"
    if len(well) < MIN_SAMPLES:
        return f"{len(well)} samples are too few for a suggestion: {MIN_SAMPLES} are needed"
    return ""
