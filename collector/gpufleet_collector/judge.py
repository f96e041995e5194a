"""The judge: every few seconds it runs the rules that are due and makes findings and incidents of them.

Store tables -> `find_<rule>(as_of)` -> findings.step -> incidents -> one transaction with `judge_state`. It
reads through cursors of its own and writes once per pass, so that ingest hardly waits for it. A rule that
fails or takes too long is reported and left out of the pass; the others go on.
"""

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import duckdb

from gpufleet_collector import baselines, findings, inventory, people, views
from gpufleet_collector.findings import BAD, Evidence, Finding, Policy, Verdict
from gpufleet_collector.incidents import Incidents, rank
from gpufleet_collector.limits import JudgeSettings, check_settings, compile_limits, limits_view
from gpufleet_collector.rules import NO_PROBE, WAITS, Rule, install, load_rules, one_line, reads, seconds
from gpufleet_collector.store import LIVE, Store

log = logging.getLogger(__name__)

AWAY = timedelta(seconds=30)
"""A longer time without a pass (and three intervals) means that the collector was away: it proves nothing."""

KNOWN = ("ok", "warn", "crit", "unknown", "n/a")

LOOKS_BACK = 2
"""Intervals that a sample may be on its way and still be counted when a newer one overtook it."""

WORTH_TWO_S = 0.3
"""Rules that took so long together are asked in two threads; less is not worth sharing things twice."""

SERIES = "bench_series"
"""The dearest of what rules share."""

SHARED = ("expected_at", "found_by", "card_list", "node_list", "port_list", "port_model", SERIES)
"""Shared macros of one argument, as_of: worked out once for all rules of a pass. Each before its users."""


@dataclass(frozen=True, slots=True)
class RuleRun:
    """One rule in one pass.

    Attributes:
        status: ok, failed, too slow or "n/a: no such probe".
        error: One line; empty when ok.
        counts: Entities by verdict.
    """

    rule: str
    status: str
    error: str
    seconds: float
    counts: Mapping[str, int]


@dataclass(slots=True)
class PassReport:
    """What one pass did."""

    as_of: datetime
    seconds: float = 0.0
    warming_up: bool = False
    runs: list[RuleRun] = field(default_factory=list)
    fired: list[Finding] = field(default_factory=list)
    resolved: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a rule said that matters: bad verdicts, and ok ones where there is a finding."""

    run: RuleRun
    verdicts: Sequence[Verdict]
    """Those of older samples first."""
    gone: frozenset[tuple[str, str]]
    """Entities with a finding that the rule no longer names."""


class Judge:
    """Runs the rules of one store. One thread calls `run_pass` or `run_forever`."""

    def __init__(
        self,
        store: Store,
        settings: JudgeSettings,
        now: Callable[[], datetime] | None = None,
        rules: Sequence[Rule] | None = None,
        learns: bool = True,
    ) -> None:
        """Check the settings, make rules and views, and take up what the last judge left.

        Args:
            store: What is judged, and where findings go.
            settings: Limits, and what a site runs differently.
            now: The clock of `run_forever`.
            rules: None = all that come with the collector.
            learns: Whether expectations and baselines are learned too; a replay takes them as they are.

        Raises:
            ConfigError: The settings name a rule or limit that does not exist, or a value is not readable.
        """
        self._store = store
        self._settings = settings
        self._now = now or _utc_now
        self._learns = learns
        self._rules = tuple(load_rules() if rules is None else rules)
        check_settings(settings, self._rules)
        self.policies = {rule.name: Policy.of(rule, settings) for rule in self._rules}
        self._uses = {
            rule.name: [name for name in SHARED if name in reads(rule).words] for rule in self._rules
        }
        self.every_s = seconds(settings.judge.every)
        self._phases = phases(self.policies, self.every_s)
        self._warm_up = timedelta(seconds=seconds(settings.judge.warm_up))
        self._timeout_s = seconds(settings.judge.rule_timeout)
        self._version = -1
        self._last_pass: datetime | None = None
        self._shifted: list[Finding] = []
        self._closed = people.Closed(0, {}, {})
        self._ended: dict[tuple[str, str, str], tuple[datetime, ...]] = {}
        self._pairs: object = None
        self._compiled: set[tuple[str, str]] | None = None
        self._renames: object = None
        self._made: dict[str, str] = {}
        self._shown: dict[str, tuple[object, ...]] = {}
        self._took: dict[str, float] = {}
        self._warm_until: datetime | None = None
        self._awaited: set[str] = set()
        self._waiting_since: datetime | None = None
        self._first = True
        self.prepare()

    @property
    def warming_up(self) -> bool:
        """True until the agents that were known before the start are back, at most `judge.warm_up`."""
        return self._warm_until is not None

    def unmade(self, rule: str) -> str:
        """Why this rule's macro could not be made; empty = it could."""
        return self._made.get(rule, "")

    def prepare(self) -> None:
        """Make macros and views again if a table changed since."""
        if self._version == self._store.schema_version:
            return
        self._version = self._store.schema_version
        self._load()  # the store may have been opened again, or begun anew
        self._made = install(self._store, self._rules, [limits_view(rule) for rule in self._rules])
        views.create(self._store)
        self._store.checkpoint()  # no replay of a log has to make them again
        self._pairs = self._compiled = None

    def compile(self, as_of: datetime) -> None:
        """Write table `limits` again when a node or card model came or went."""
        with self._store.reader(LIVE) as read:
            mark = read.execute(
                "SELECT * FROM (SELECT count(*), sum(hash(node)) FROM node), "
                "(SELECT count(*), max(set_at) FROM expected WHERE set_at <= $at), "
                "(SELECT count(*), max(valid_from) FROM inventory WHERE valid_from <= $at)",
                {"at": as_of},
            ).fetchone()
            if mark == self._pairs:
                return
            pairs = set(
                read.execute(
                    "SELECT DISTINCT node, coalesce(model, '') FROM card_list($at) "
                    "UNION SELECT node, '' FROM node_list($at)",
                    {"at": as_of},
                ).fetchall()
            )
        if pairs != self._compiled:  # mostly it is a port or an attribute that changed
            with self._store.transaction() as write:
                compile_limits(write, self._rules, self._settings, pairs)
        self._pairs, self._compiled = mark, pairs

    def run_pass(self, as_of: datetime) -> PassReport:
        """Run the rules that are due at `as_of` (collector's clock, UTC) and store what follows."""
        as_of = as_of.astimezone(UTC).replace(tzinfo=None) if as_of.tzinfo else as_of
        started = time.perf_counter()
        report = PassReport(as_of)
        self.prepare()
        if self._learns:
            inventory.learn(self._store, as_of)
        self.compile(as_of)
        with self._store.reader(LIVE) as read:
            self._follow_renames(read)
            self._begin(read, as_of)
            due = [rule for rule in self._rules if self._is_due(self.policies[rule.name], as_of)]
            answers = self._ask_all(due, as_of)
            booted = self._boots(read, answers, as_of)
            answers = [self._with_overtaken(read, answer, booted, as_of) for answer in answers]
        report.warming_up = self.warming_up
        report.runs = [answer.run for answer in answers]
        self._took |= {run.rule: run.seconds for run in report.runs}
        try:
            self._conclude(answers, booted, as_of, report)
        except BaseException:
            self._load()  # what is in memory may be ahead of what was stored
            raise
        minute = self._last_pass is None or _slot(as_of, 60) != _slot(self._last_pass, 60)
        if self._learns and minute:
            baselines.learn(self._store, as_of)
        if self._last_pass is None or _slot(as_of, 3600) != _slot(self._last_pass, 3600):
            baselines.learn_anew(self._store, as_of)
        self._last_pass = as_of
        report.seconds = time.perf_counter() - started
        return report

    def run_forever(self, stop: threading.Event) -> None:
        """Run a pass at each multiple of `judge.every` until `stop`; one that fails is logged, not fatal."""
        failing = ""
        while not stop.wait(self.every_s - time.time() % self.every_s):
            try:
                self.run_pass(self._now())
                if failing:
                    log.info("judge: passes work again")
                failing = ""
            except Exception as error:  # whatever it is, the next pass may work, and nobody else judges
                if failing != one_line(error):
                    failing = one_line(error)
                    log.exception("judge: a pass failed")

    def _load(self) -> None:
        with self._store.reader(LIVE) as read:
            row = read.execute("SELECT max(last_pass_at) FROM judge_state").fetchone()
            self._last_pass = row[0] if row else None
            self._closed = people.closed(read, 0) or people.Closed(0, {}, {})  # first: it may grow meanwhile
            tracked = findings.load(read)
            self._ended = findings.lately(read, self._last_pass) if self._last_pass else {}
            self._shifted = []
            self._tracked = {finding.key: finding for finding in tracked}
            self._incidents = Incidents(self.policies)
            self._incidents.load(read, tracked, self._last_pass or datetime.min + timedelta(days=1))

    def _is_due(self, policy: Policy, as_of: datetime) -> bool:
        """Aligned to the clock and to the last stored pass, so that a restart neither skips nor repeats."""
        if not policy.enabled or self._last_pass is None:
            return policy.enabled
        phase = self._phases[policy.rule]
        return _slot(as_of - phase, policy.every_s) != _slot(self._last_pass - phase, policy.every_s)

    def _follow_renames(self, read: duckdb.DuckDBPyConnection) -> None:
        """A renamed node's findings go by the new name in the store: take them from there."""
        mark = read.execute("SELECT count(*), max(renamed_at) FROM node_alias").fetchone()
        if mark != self._renames:
            self._renames = mark
            self._load()

    def _begin(self, read: duckdb.DuckDBPyConnection, as_of: datetime) -> None:
        """Notice that the collector was away, and wait for the agents that it knew."""
        last = self._last_pass
        away = last is not None and as_of - last > max(AWAY, timedelta(seconds=3 * self.every_s))
        if last is not None and (self._first or away):
            known = read.execute("SELECT node FROM heard_at(?, '90 seconds')", [last]).fetchall()
            self._awaited = {row[0] for row in known}
            self._warm_until, self._waiting_since = as_of + self._warm_up, last
            if away:
                for finding in self._tracked.values():
                    if finding.recovering_at is not None:
                        finding.recovering_at += as_of - last
                        self._shifted.append(finding)
        self._first = False
        if self._warm_until is None or self._waiting_since is None:
            return
        back = read.execute("SELECT node FROM heard_at(?, '10 minutes') WHERE received_at > ?",
                            [as_of, self._waiting_since]).fetchall()  # fmt: skip
        self._awaited -= {row[0] for row in back}
        if not self._awaited or as_of >= self._warm_until:
            self._warm_until = self._waiting_since = None
            log.info("judge: warmed up, %d known agents are not back", len(self._awaited))

    def _ask_all(self, due: Sequence[Rule], as_of: datetime) -> list[_Answer]:
        """Run these rules, in two threads where they take long: the engine runs each in the one that asks."""

        def ask(rules: Sequence[Rule]) -> list[_Answer]:
            with self._store.reader(LIVE) as read:
                self._share(read, rules, as_of)
                return [self._ask(read, rule, as_of) for rule in rules]

        halves = self._halves(due)
        if len(halves) == 1:
            return ask(due)
        with ThreadPoolExecutor(len(halves)) as pool:
            answers = {answer.run.rule: answer for some in pool.map(ask, halves) for answer in some}
        return [answers[rule.name] for rule in due]

    def _halves(self, due: Sequence[Rule]) -> list[list[Rule]]:
        """Two parts that took about as long last time; what works on the series of benches stays together."""
        took = {rule.name: self._took.get(rule.name, 0.0) for rule in due}
        if sum(took.values()) < WORTH_TWO_S or len(os.sched_getaffinity(0)) < 2:
            return [list(due)]
        alike: dict[str, list[Rule]] = {}
        for rule in due:
            alike.setdefault(SERIES if SERIES in self._uses[rule.name] else rule.name, []).append(rule)
        halves: tuple[list[Rule], list[Rule]] = ([], [])
        for some in sorted(alike.values(), key=lambda those: -sum(took[one.name] for one in those)):
            min(halves, key=lambda half: sum(took[one.name] for one in half)).extend(some)
        return [half for half in halves if half]

    def _share(self, read: duckdb.DuckDBPyConnection, due: Sequence[Rule], as_of: datetime) -> None:
        """Let `SHARED` macros that two rules or more use read a table of this cursor's own, made once."""
        users = Counter(name for rule in due for name in self._uses[rule.name])
        with suppress(duckdb.Error), self._bounded(read):  # without it each rule fails, or not, by itself
            for query in shared([name for name in SHARED if users[name] > 1], as_of):
                read.execute(query)

    @contextmanager
    def _bounded(self, read: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Interrupt what runs longer than a rule may."""
        timer = threading.Timer(self._timeout_s, read.interrupt)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _ask(self, read: duckdb.DuckDBPyConnection, rule: Rule, as_of: datetime) -> _Answer:
        """Run one rule; its trouble stays its own."""
        started = time.perf_counter()
        nobody: frozenset[tuple[str, str]] = frozenset()
        if self._made.get(rule.name):
            return _Answer(RuleRun(rule.name, NO_PROBE, self._made[rule.name], 0.0, {}), (), nobody)
        try:
            with self._bounded(read):
                counts, verdicts, gone = self._verdicts(read, rule, as_of)
            status, error = "ok", ""
            strange = sorted(set(counts) - set(KNOWN))
            if strange:
                status, error = "failed", f"verdict {strange[0]!r} is none of {', '.join(KNOWN)}"
                verdicts, gone = (), nobody
        except duckdb.InterruptException:
            status, error = "too slow", f"stopped after {self._timeout_s:g} s"
            counts, verdicts, gone = {}, (), nobody
        except duckdb.Error as problem:
            status, error = "failed", one_line(problem)
            counts, verdicts, gone = {}, (), nobody
        run = RuleRun(rule.name, status, error, time.perf_counter() - started, counts)
        return _Answer(run, verdicts, gone)

    def _verdicts(
        self, read: duckdb.DuckDBPyConnection, rule: Rule, as_of: datetime
    ) -> tuple[dict[str, int], Sequence[Verdict], frozenset[tuple[str, str]]]:
        tracked = {(one.node, one.entity) for one in self._tracked.values() if one.rule == rule.name}
        wanted, given = "verdict IN ('warn', 'crit')", []
        if tracked:
            wanted += f" OR {_GIVEN}"
            given = [list(column) for column in zip(*tracked, strict=True)]
        # one statement: it costs less than a table of all that is said, which is asked for counts and rows
        rows = read.execute(
            f"WITH said AS MATERIALIZED (FROM find_{rule.name}(TIMESTAMP '{as_of.isoformat(' ')}')) "
            f"SELECT coalesce(verdict, 'NULL'), count(*){', NULL' * 9} FROM said GROUP BY 1 UNION ALL "
            "SELECT verdict, NULL, node, entity, code, observed, expected, unit, evidence_at, "
            f"coalesce(reason, code), detail::VARCHAR FROM said WHERE {wanted}",
            given,
        ).fetchall()
        counts = {verdict: count for verdict, count, *_ in rows if count is not None}
        named = {(node, entity) for _, count, node, entity, *_ in rows if count is None}
        verdicts = [
            Verdict(node, entity, verdict, code, *rest)
            for verdict, count, node, entity, code, *rest in rows
            # an agent may leave out any cell: words made of it are NULL then, and an entity is none
            if count is None and verdict in ("ok", *BAD) and None not in (node, entity, code)
        ]
        verdicts.sort(key=lambda one: (one.node, one.entity))
        return counts, verdicts, frozenset(tracked - named)

    def _with_overtaken(
        self,
        read: duckdb.DuckDBPyConnection,
        answer: _Answer,
        booted: Mapping[str, datetime],
        as_of: datetime,
    ) -> _Answer:
        """Put the samples before the newest that were in after the last pass before what the rule said.

        Of two samples that arrive between two passes the rule judges the newer one. So where that is bad and
        nothing has fired yet, the rule is asked again for an interval ago, with the rows that are here now,
        and once more if that is still the same sample. What was seen then is known by its time and counts
        once.
        """
        policy = self.policies[answer.run.rule]
        newest = {
            (verdict.node, verdict.entity): verdict.evidence_at
            for verdict in answer.verdicts
            if policy.each_sample and self._is_open(policy, verdict, booted)
        }
        older: list[Verdict] = []
        began, at = time.perf_counter(), as_of
        with suppress(duckdb.Error), self._bounded(read):  # without them the newest samples count alone
            for _ in range(LOOKS_BACK):
                if not newest:
                    break
                at -= timedelta(seconds=policy.every_s)
                rows = read.execute(
                    f"SELECT {_CELLS} FROM find_{policy.rule}(TIMESTAMP '{at.isoformat(' ')}') "
                    f"WHERE {_NAMED} AND {_GIVEN} ORDER BY node, entity",
                    [[node for node, _ in newest], [entity for _, entity in newest]],
                ).fetchall()
                said = [Verdict(*row) for row in rows]
                older += [one for one in said if one.evidence_at != newest[one.node, one.entity]]
                same = {(one.node, one.entity) for one in said} - {(one.node, one.entity) for one in older}
                newest = {key: newest[key] for key in newest if key in same}
        run = replace(answer.run, seconds=answer.run.seconds + time.perf_counter() - began)
        return replace(answer, run=run, verdicts=(*older, *answer.verdicts))

    def _boots(
        self, read: duckdb.DuckDBPyConnection, answers: Sequence[_Answer], as_of: datetime
    ) -> Mapping[str, datetime]:
        """When the nodes in trouble booted, as far as they say."""
        nodes = {
            verdict.node
            for answer in answers
            if self.policies[answer.run.rule].boot_grace
            for verdict in answer.verdicts
            if verdict.verdict in BAD
        }
        if not nodes or "uptime_s" not in self._store.tables.get("host", {}):
            return {}
        rows = read.execute(
            "SELECT node, max_by(ts - to_seconds(uptime_s), ts) FROM host WHERE ts > $at - INTERVAL 5 MINUTE "
            "AND ts <= $at AND uptime_s BETWEEN 0 AND 1e9 AND node IN (SELECT unnest($nodes::VARCHAR[])) "
            "GROUP BY node",
            {"at": as_of, "nodes": sorted(nodes)},
        ).fetchall()
        return dict(rows)

    def _conclude(
        self,
        answers: Sequence[_Answer],
        booted: Mapping[str, datetime],
        as_of: datetime,
        report: PassReport,
    ) -> None:
        changes = self._retire(as_of)
        for answer in answers:
            policy = self.policies[answer.run.rule]
            changes += self._take(policy, answer, booted, as_of)
        changed = {finding.key for finding, _ in changes}
        changes += [(finding, "seen") for finding in self._shifted if finding.key not in changed]
        self._shifted = []
        changes.sort(key=lambda change: self._order(*change))
        with self._store.transaction() as write, self._store.reader(LIVE) as read:
            over = self._follow_people(write)
            changes = [change for change in changes if change[0].id not in over]
            fresh = list({finding.key: finding for finding, _ in changes if finding.id == 0}.values())
            for finding, number in zip(fresh, findings.new_ids(write, len(fresh)), strict=True):
                finding.id = number
            self._incidents.take(changes, as_of, read)
            dropped = [finding for finding, change in changes if change == "dropped"]
            kept = {finding.id: finding for finding, change in changes if change != "dropped"}
            kept.update(self._incidents.moved)
            findings.drop(write, dropped)
            findings.save(write, list(kept.values()), as_of)
            self._incidents.save(write)
            self._report_rules(write, answers, as_of)
            write.execute("DELETE FROM live.judge_state")
            write.execute("INSERT INTO live.judge_state VALUES (?)", [as_of])
        self._incidents.forget(as_of)
        for finding, change in changes:
            if change in ("dropped", "resolved") and self._tracked.get(finding.key) is finding:
                del self._tracked[finding.key]
            if change == "resolved":
                self._ended[finding.key] = finding.flaps
        lately = as_of - findings.FLAP_SPAN
        self._ended = {key: flaps for key, flaps in self._ended.items() if flaps and flaps[0] >= lately}
        report.fired = [finding for finding, change in changes if change == "fired"]
        report.resolved = [finding for finding, change in changes if change == "resolved"]
        for finding, change in changes:
            if change in ("fired", "worse", "resolved"):
                log.info(
                    "%s %s %s: %s (%s)", finding.node, finding.entity, finding.rule, change, finding.reason
                )

    def _follow_people(self, write: duckdb.DuckDBPyConnection) -> frozenset[int]:
        """Let go of what people closed since; returns those findings: what this pass says of them is old."""
        news = people.closed(write, self._closed.act)
        if news is None:
            return frozenset()
        self._closed = news
        gone = [finding for finding in self._tracked.values() if finding.incident in news.incidents]
        for finding in gone:
            del self._tracked[finding.key]
        for number, (at, cause) in news.incidents.items():
            self._incidents.closed(number, at, cause)
            log.info("INC-%d: %s", number, cause)
        return frozenset(finding.id for finding in gone)

    def _retire(self, as_of: datetime) -> list[tuple[Finding, str]]:
        """End findings of rules that are gone or switched off."""
        changes = []
        for finding in self._tracked.values():
            policy = self.policies.get(finding.rule)
            if policy is None or not policy.enabled:
                changes.append((finding, self._end(finding, "the rule no longer runs", as_of)))
        return changes

    def _take(
        self, policy: Policy, answer: _Answer, booted: Mapping[str, datetime], as_of: datetime
    ) -> list[tuple[Finding, str]]:
        changes: list[tuple[Finding, str]] = []
        for verdict in answer.verdicts:
            bad = verdict.verdict in BAD
            if bad and self._is_excused(policy, verdict, booted):
                continue
            finding = self._tracked.get((policy.rule, verdict.node, verdict.entity))
            if finding is not None:
                change = findings.step(policy, finding, verdict, as_of)
            elif bad and verdict.evidence_at is not None and self._is_news(policy, verdict):
                flaps = self._ended.get((policy.rule, verdict.node, verdict.entity), ())
                finding, change = findings.begin(policy, verdict, as_of, flaps)
                self._tracked[finding.key] = finding
            else:
                continue
            if change:
                changes.append((finding, change))
            if change == "dropped":  # the next verdict on it may begin anew
                del self._tracked[finding.key]
        for node, entity in sorted(answer.gone):
            finding = self._tracked[(policy.rule, node, entity)]
            changes.append(
                (finding, self._end(finding, "no longer judged: not expected and not there", as_of))
            )
        return changes

    def _is_open(self, policy: Policy, verdict: Verdict, booted: Mapping[str, datetime]) -> bool:
        """Whether it is new evidence, and fires with one more like it: the sample before it matters."""
        if verdict.verdict not in BAD or verdict.evidence_at is None:
            return False
        finding = self._tracked.get((policy.rule, verdict.node, verdict.entity))
        if finding is None:
            if self._is_excused(policy, verdict, booted) or not self._is_news(policy, verdict):
                return False
        elif finding.state != "pending" or verdict.evidence_at <= finding.last_evidence_at:
            return False
        said = Evidence(verdict.evidence_at, verdict.verdict, verdict.code)
        before = finding.evidence if finding else ()
        return findings.worst_reached(policy, (said, said, *before)) is not None

    def _is_excused(self, policy: Policy, verdict: Verdict, booted: Mapping[str, datetime]) -> bool:
        """Whether it does not count, however bad."""
        return self._too_early(policy, verdict, booted) or (policy.absence and self.warming_up)

    def _is_news(self, policy: Policy, verdict: Verdict) -> bool:
        """Whether it is newer than what a person has closed."""
        seen = self._closed.evidence.get((policy.rule, verdict.node, verdict.entity))
        return seen is None or (verdict.evidence_at is not None and verdict.evidence_at > seen)

    @staticmethod
    def _too_early(policy: Policy, verdict: Verdict, booted: Mapping[str, datetime]) -> bool:
        boot = booted.get(verdict.node)
        return (
            boot is not None
            and verdict.evidence_at is not None
            and boot - timedelta(seconds=5) <= verdict.evidence_at < boot + policy.boot_grace
        )

    @staticmethod
    def _end(finding: Finding, cause: str, as_of: datetime) -> str:
        if finding.state == "pending":
            return "dropped"
        findings.resolve(finding, cause, as_of)
        return "resolved"

    def _order(self, finding: Finding, change: str) -> tuple[int, int, str, str, str]:
        """Causes before effects, so that one pass opens one incident."""
        policy = self.policies.get(finding.rule)
        place = rank(policy, finding.entity) if policy else 9
        return (0 if change == "fired" else 1, place, finding.node, finding.entity, finding.rule)

    def _report_rules(
        self, write: duckdb.DuckDBPyConnection, answers: Sequence[_Answer], as_of: datetime
    ) -> None:
        """Table `rule`: rewritten when a status or count changed, and once a minute."""
        runs = {answer.run.rule: answer.run for answer in answers}
        minute = _slot(as_of, 60)
        for rule in self._rules:
            policy, run = self.policies[rule.name], runs.get(rule.name)
            if run is None and policy.enabled:
                continue
            status = run.status if run else "disabled"
            counts = [run.counts.get(verdict, 0) if run else None for verdict in KNOWN]
            shown = (status, run.error if run else "", *counts, minute)
            before = self._shown.get(rule.name)
            if before == shown:
                continue
            if run and status != "ok" and (before is None or before[0] != status):
                if run.error.startswith(WAITS):
                    log.info("rule %s %s", rule.name, run.error)
                else:
                    log.warning("rule %s: %s: %s", rule.name, status, run.error)
            elif before is not None and before[0] not in ("ok", "disabled") and status == "ok":
                log.info("rule %s: works", rule.name)
            self._shown[rule.name] = shown
            write.execute("DELETE FROM live.rule WHERE rule = ?", [rule.name])
            write.execute(
                "INSERT INTO live.rule VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    rule.name, policy.title, policy.scope, policy.runbook, policy.every_s,
                    f"{policy.need.k} of {policy.need.n}", policy.clear_after.total_seconds(),
                    policy.shadow, policy.enabled, status, run.error if run else "", as_of,
                    run.seconds if run else None, *counts,
                ],
            )  # fmt: skip


_CELLS = (
    "node, entity, verdict, code, observed, expected, unit, evidence_at, coalesce(reason, code), "
    "detail::VARCHAR"
)
"""Of a rule's row, as `Verdict` takes them."""

_NAMED = "node IS NOT NULL AND entity IS NOT NULL AND code IS NOT NULL"
"""An agent may leave out any cell: words made of it are NULL then, and an entity is none."""

_GIVEN = "(node, entity) IN (SELECT (unnest(?::VARCHAR[]), unnest(?::VARCHAR[])))"


def shared(names: Iterable[str], as_of: datetime) -> Iterator[str]:
    """The statements that make these macros of `SHARED` tables of the cursor that runs them.

    What is temporary comes before live and rules in the search path: rules read it under the same name.
    """
    for name in names:
        yield f"CREATE TEMP TABLE {name}_now AS FROM {name}(TIMESTAMP '{as_of.isoformat(' ')}')"
        yield f"CREATE TEMP MACRO {name}(as_of) AS TABLE FROM {name}_now"


def _slot(at: datetime, every_s: float) -> int:
    return math.floor((at - datetime(1970, 1, 1)).total_seconds() / every_s)


def phases(policies: Mapping[str, Policy], pass_s: float) -> dict[str, timedelta]:
    """When in its interval each rule runs: the dearest choose first, each where the passes have least to do.

    It depends on nothing but the rules, so that a restart and a replay run them at the same times.
    """
    load = [0.0] * _TURNS
    found: dict[str, timedelta] = {}
    for rule, policy in sorted(
        policies.items(), key=lambda item: (-item[1].weight, item[1].every_s, item[0])
    ):
        every = min(max(1, round(policy.every_s / pass_s)), _TURNS)
        turn = min(range(every), key=lambda first: (max(load[first::every]), sum(load[first::every])))
        for number in range(turn, _TURNS, every):
            load[number] += policy.weight
        found[rule] = timedelta(seconds=turn * pass_s % policy.every_s)
    return found


_TURNS = 720
"""As many passes as are looked at to spread the rules: an hour of them at 5 s."""


def _utc_now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)
