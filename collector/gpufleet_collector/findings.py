"""From verdicts to findings: hysteresis by distinct evidence, and the one table it is kept in.

A finding is a rule's trouble with one entity: pending -> firing -> recovering -> resolved. What counts is
evidence (`evidence_at`), not passes: a sample seen by a hundred passes counts once, and a gap counts nothing.
Everything that decides stands in table `finding`, so that a restart forgets nothing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import duckdb

from gpufleet_collector.limits import JudgeSettings, RuleOverride
from gpufleet_collector.rules import Need, Rule, seconds

BAD = ("warn", "crit")

FLAPS = 3
"""A finding that fires this often within `FLAP_SPAN` is flapping."""

FLAP_SPAN = timedelta(hours=1)
"""A flapping finding stays open until its evidence was clean for so long."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one rule's verdicts become findings: its header, with what the site changed."""

    rule: str
    title: str
    scope: str
    runbook: str
    covers: str
    every_s: float
    need: Need
    code_needs: Mapping[str, Need]
    also: tuple[str, ...]
    clear_after: timedelta
    min_duration: timedelta
    boot_grace: timedelta
    max_severity: str
    latch: bool
    weight: float
    each_sample: bool
    absence: bool
    shadow: bool
    enabled: bool

    @classmethod
    def of(cls, rule: Rule, settings: JudgeSettings) -> "Policy":
        """The policy of `rule` under `settings`.

        Raises:
            ValueError: A duration or "k of n" of the settings cannot be read.
        """
        header, changed = rule.header, settings.rule.get(rule.name, RuleOverride())
        return cls(
            rule=rule.name,
            title=header.title,
            scope=header.scope,
            runbook=header.runbook,
            covers=header.covers,
            every_s=seconds(changed.every or header.every),
            need=Need.parse(changed.for_ or header.for_),
            # a site that asks for less evidence means it for every code
            code_needs={} if changed.for_ else {code: Need.parse(n) for code, n in header.for_code.items()},
            also=tuple(header.also),
            clear_after=timedelta(seconds=seconds(changed.clear_after or header.clear_after)),
            min_duration=timedelta(seconds=seconds(changed.min_duration or header.min_duration)),
            boot_grace=timedelta(seconds=seconds(changed.boot_grace or header.boot_grace)),
            max_severity=header.max_severity,
            latch=header.latch,
            weight=header.weight,
            each_sample=header.each_sample,
            absence=header.absence,
            shadow=header.shadow if changed.shadow is None else changed.shadow,
            enabled=changed.enabled,
        )

    @property
    def keeps(self) -> int:
        """How much evidence a finding remembers."""
        return max([self.need.n, *(need.n for need in self.code_needs.values())])


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of a rule."""

    node: str
    entity: str
    verdict: str
    code: str
    observed: float | None
    expected: float | None
    unit: str | None
    evidence_at: datetime | None
    reason: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one sample said."""

    at: datetime
    verdict: str
    code: str


@dataclass(slots=True)
class Finding:
    """One episode of a rule's trouble with one entity: a row of table `finding`."""

    id: int
    rule: str
    node: str
    entity: str
    state: str
    verdict: str
    code: str
    observed: float | None
    expected: float | None
    unit: str | None
    reason: str
    detail: str | None
    evidence: tuple[Evidence, ...]
    began_at: datetime
    fired_at: datetime | None
    recovering_at: datetime | None
    resolved_at: datetime | None
    cause: str | None
    last_evidence_at: datetime
    updated_at: datetime
    flaps: tuple[datetime, ...] = ()
    """When it and the episodes right before it fired, newest first, at most `FLAPS`."""
    flapping: bool = False
    """Fired and cleared so often that it is one long trouble."""
    incident: int | None = None
    stored: bool = field(default=False, compare=False)
    """A row of it exists."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Rule, node, entity: at most one finding of a key is not resolved."""
        return (self.rule, self.node, self.entity)


def worst_reached(policy: Policy, evidence: Sequence[Evidence]) -> str | None:
    """The worst verdict that k of the newest n samples reached; a crit counts as a warn too. None = not k."""

    def reached(need: Need, bad: Iterable[Evidence]) -> str | None:
        verdicts = [sample.verdict for sample in bad if sample.verdict in BAD]
        if verdicts.count("crit") >= need.k:
            return "crit"
        return "warn" if len(verdicts) >= need.k else None

    answers = [reached(policy.need, evidence[: policy.need.n])]
    answers += [
        reached(need, (sample for sample in evidence[: need.n] if sample.code == code))
        for code, need in policy.code_needs.items()
    ]
    worst = "crit" if "crit" in answers else ("warn" if "warn" in answers else None)
    return policy.max_severity if worst == "crit" else worst


def begin(
    policy: Policy, verdict: Verdict, as_of: datetime, flaps: tuple[datetime, ...] = ()
) -> tuple[Finding, str]:
    """A new finding from its first bad sample; also fires when one is enough.

    Args:
        policy: Of the rule.
        verdict: The bad sample.
        as_of: Now.
        flaps: When earlier episodes of the same trouble fired, newest first.
    """
    assert verdict.evidence_at is not None
    finding = Finding(
        id=0, rule=policy.rule, node=verdict.node, entity=verdict.entity, state="pending", verdict="warn",
        code=verdict.code, observed=None, expected=None, unit=None, reason="", detail=None, evidence=(),
        began_at=verdict.evidence_at, fired_at=None, recovering_at=None, resolved_at=None, cause=None,
        last_evidence_at=datetime.min, updated_at=as_of, flaps=flaps,
    )  # fmt: skip
    fired = step(policy, finding, verdict, as_of) == "fired"
    return finding, "fired" if fired else "began"


def step(policy: Policy, finding: Finding, verdict: Verdict, as_of: datetime) -> str:
    """Take one verdict in; returns what it changed.

    "" nothing that matters, "seen" evidence to remember, "fired", "worse", "recovering", "relapsed",
    "resolved", or "dropped": it never fired and is forgotten. Only ok, warn and crit are evidence, and only
    once per `evidence_at`.
    """
    at = verdict.evidence_at
    if at is None or verdict.verdict not in ("ok", *BAD) or at <= finding.last_evidence_at:
        return ""
    before = [(sample.verdict, sample.code) for sample in finding.evidence]
    newest = Evidence(at, verdict.verdict, verdict.code)
    finding.evidence = (newest, *finding.evidence)[: policy.keeps]
    finding.last_evidence_at = at
    if verdict.verdict == "ok":
        return _clean(policy, finding, at, as_of)
    changed = _bad(policy, finding, verdict, at, as_of)
    if changed:
        return changed
    after = [(sample.verdict, sample.code) for sample in finding.evidence]
    # A long trouble is written once a minute: the row would say the same.
    quiet = (
        finding.state == "firing" and before == after and as_of - finding.updated_at < timedelta(minutes=1)
    )
    return "" if quiet else "seen"


def _bad(policy: Policy, finding: Finding, verdict: Verdict, at: datetime, as_of: datetime) -> str:
    finding.code, finding.reason, finding.detail = verdict.code, verdict.reason, verdict.detail
    finding.observed, finding.expected, finding.unit = verdict.observed, verdict.expected, verdict.unit
    worst = worst_reached(policy, finding.evidence)
    if finding.state == "pending":
        if worst is None or at - finding.began_at < policy.min_duration:
            return ""
        finding.state, finding.verdict, finding.fired_at = "firing", worst, as_of
        finding.flaps = (as_of, *(then for then in finding.flaps if as_of - then <= FLAP_SPAN))[:FLAPS]
        finding.flapping = len(finding.flaps) == FLAPS
        return "fired"
    relapsed = finding.state == "recovering"
    finding.state, finding.recovering_at = "firing", None
    if worst == "crit" and finding.verdict != "crit":
        finding.verdict = "crit"
        return "worse"
    return "relapsed" if relapsed else ""


def _clean(policy: Policy, finding: Finding, at: datetime, as_of: datetime) -> str:
    if finding.state == "pending":
        still = any(sample.verdict in BAD for sample in finding.evidence)
        return "seen" if still else "dropped"
    changed = "seen"
    if finding.state == "firing":
        finding.state, finding.recovering_at, changed = "recovering", at, "recovering"
    need = policy.code_needs.get(finding.code, policy.need)
    clean = next(
        (n for n, sample in enumerate(finding.evidence) if sample.verdict in BAD), len(finding.evidence)
    )
    hold = max(policy.clear_after, FLAP_SPAN) if finding.flapping else policy.clear_after
    long_enough = finding.recovering_at is not None and at - finding.recovering_at >= hold
    if clean >= need.k and long_enough and not policy.latch:
        resolve(finding, "clean evidence", as_of)
        return "resolved"
    return changed


def resolve(finding: Finding, cause: str, as_of: datetime) -> None:
    """End the episode; the row stays, with its cause."""
    finding.state, finding.resolved_at, finding.cause = "resolved", as_of, cause


def load(read: duckdb.DuckDBPyConnection) -> list[Finding]:
    """Every finding that is not resolved."""
    rows = read.execute(
        f"SELECT {', '.join(_COLUMNS)} FROM live.finding WHERE state <> 'resolved' ORDER BY id"
    ).fetchall()
    return [_from_row(row) for row in rows]


def lately(
    read: duckdb.DuckDBPyConnection, as_of: datetime
) -> dict[tuple[str, str, str], tuple[datetime, ...]]:
    """When what was resolved lately had fired, by rule, node and entity: what a next episode must know."""
    rows = read.execute(
        "SELECT rule, node, entity, max_by(flaps, id) FROM live.finding "
        "WHERE state = 'resolved' AND resolved_at > ? AND flaps IS NOT NULL GROUP BY ALL",
        [as_of - FLAP_SPAN],
    ).fetchall()
    return {(rule, node, entity): _times(flaps) for rule, node, entity, flaps in rows}


def save(write: duckdb.DuckDBPyConnection, findings: Sequence[Finding], as_of: datetime) -> None:
    """Write these findings' rows. New ones need their `id` first (`new_ids`)."""
    for finding in findings:
        finding.updated_at = as_of
    old = [finding for finding in findings if finding.stored]
    new = [finding for finding in findings if not finding.stored]
    cells = ", ".join(f"unnest(?::{kind}[]) AS {name}" for name, kind in _COLUMNS.items())
    if new:
        write.execute(f"INSERT INTO live.finding BY NAME SELECT {cells}", _columns(new))
    if old:
        sets = ", ".join(f"{name} = s.{name}" for name in _COLUMNS if name != "id")
        write.execute(
            f"UPDATE live.finding SET {sets} FROM (SELECT {cells}) s WHERE finding.id = s.id", _columns(old)
        )
    for finding in new:
        finding.stored = True


def drop(write: duckdb.DuckDBPyConnection, findings: Sequence[Finding]) -> None:
    """Forget findings that never fired."""
    ids = [finding.id for finding in findings if finding.stored]
    if ids:
        write.execute("DELETE FROM live.finding WHERE id IN (SELECT unnest(?::BIGINT[]))", [ids])


def new_ids(write: duckdb.DuckDBPyConnection, count: int) -> list[int]:
    """As many unused finding ids."""
    rows = write.execute("SELECT nextval('live.finding_id') FROM range(?)", [count]).fetchall()
    return sorted(row[0] for row in rows)


_COLUMNS = {
    "id": "BIGINT", "rule": "VARCHAR", "node": "VARCHAR", "entity": "VARCHAR", "state": "VARCHAR",
    "verdict": "VARCHAR", "code": "VARCHAR", "observed": "DOUBLE", "expected": "DOUBLE", "unit": "VARCHAR",
    "reason": "VARCHAR", "detail": "VARCHAR", "evidence": "VARCHAR", "began_at": "TIMESTAMP",
    "fired_at": "TIMESTAMP", "recovering_at": "TIMESTAMP", "resolved_at": "TIMESTAMP", "cause": "VARCHAR",
    "last_evidence_at": "TIMESTAMP", "updated_at": "TIMESTAMP", "flaps": "VARCHAR", "flapping": "BOOLEAN",
    "incident": "BIGINT",
}  # fmt: skip


def _columns(findings: Sequence[Finding]) -> list[list[object]]:
    texts = {
        "evidence": [_evidence_json(finding.evidence) for finding in findings],
        "flaps": [_times_json(finding.flaps) for finding in findings],
    }
    return [
        list(texts[name]) if name in texts else [getattr(finding, name) for finding in findings]
        for name in _COLUMNS
    ]


def _from_row(row: Sequence[object]) -> Finding:
    cells = dict(zip(_COLUMNS, row, strict=True))
    cells["evidence"] = _evidence(str(cells["evidence"]))
    cells["flaps"] = _times(cells["flaps"])
    cells["flapping"] = bool(cells["flapping"])
    return Finding(**cells, stored=True)  # type: ignore[arg-type]


def _evidence_json(evidence: Sequence[Evidence]) -> str:
    return json.dumps([[sample.at.isoformat(), sample.verdict, sample.code] for sample in evidence])


def _evidence(text: str) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(datetime.fromisoformat(at), verdict, code) for at, verdict, code in json.loads(text)
    )


def _times_json(times: Sequence[datetime]) -> str:
    return json.dumps([at.isoformat() for at in times])


def _times(text: object) -> tuple[datetime, ...]:
    """Empty for a row of before this was noted."""
    return tuple(datetime.fromisoformat(at) for at in json.loads(str(text or "[]")))
