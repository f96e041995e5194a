"""Replay: any rule over stored history, with the real judge, in a process of its own.

The collector checks the rule, copies the rows that it may read to Parquet files (bounded by rows and by free
disk, an hour at a time), runs `replay_child` on them and compares what it found with what was really raised.
A caller who goes away ends the child; nothing is left on disk.
"""

import asyncio
import contextlib
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import msgspec

from gpufleet.config import ConfigError
from gpufleet_collector import documents, sandbox
from gpufleet_collector.documents import Document, Row, iso
from gpufleet_collector.findings import Policy
from gpufleet_collector.judge import phases
from gpufleet_collector.limits import (
    JudgeOptions,
    JudgeSettings,
    Limit,
    Limits,
    Scope,
    check_settings,
)
from gpufleet_collector.replay_child import Found, Job, Line, Plan
from gpufleet_collector.rules import Rule, parse_rule, reads, seconds
from gpufleet_collector.sandbox import Refused, TimedOut
from gpufleet_collector.store import LIVE, Store

log = logging.getLogger(__name__)

MAX_SECONDS = 3600.0
DEFAULT_SECONDS = 600.0
MAX_ROWS = 10_000_000
"""Rows of one replay."""

ROW_BYTES = 200
"""What a row takes in a Parquet file, at most."""

MAX_TEXT_BYTES = 100_000

LEAST_LOOKBACK_S = 600.0

_HISTORY = {"event": "ts", "bench": "ts"}
"""Tables that are kept for long and are small: what came before is wanted too."""

_RECEIVED = {"ledger": "received_at"}

_WHOLE = ("node", "node_alias", "probe", "expected", "inventory", "baseline", "capability")
"""Tables that are copied as they are: their rows say themselves when they held."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody wants replayed; see `fleet.proto`."""

    rule: str
    text: str
    since: datetime
    until: datetime
    step_s: float = 0.0
    as_known: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float = 0.0


class Replays:
    """Runs replays of one store, one at a time."""

    def __init__(
        self, store: Store, settings: JudgeSettings, rules: Sequence[Rule], policies: Mapping[str, Policy]
    ) -> None:
        self._store = store
        self._settings = settings
        self._rules = {rule.name: rule for rule in rules}
        self._phases = phases(policies, seconds(settings.judge.every))
        self._busy = asyncio.Lock()
        if store.exchange is not None:  # what a crash left
            shutil.rmtree(store.exchange, ignore_errors=True)

    async def run(self, request: Request, now: datetime) -> AsyncGenerator[Document | float, None]:
        """The estimate (a document), shares done, and last the result (a document).

        Raises:
            Refused: The request makes no sense, the rule is not one, or it is too much.
            TimedOut: It passed its time limit.
        """
        if self._busy.locked():
            raise Refused("another replay is running: one at a time")
        async with self._busy:
            asked = self._prepare(request, now)
            began = time.monotonic()
            folder, cancelled = await asyncio.to_thread(self._folder), threading.Event()
            try:
                rows = await asyncio.to_thread(self._export, asked, folder, cancelled)
                plan: Plan | None = None
                left_s = asked.seconds - (time.monotonic() - began)
                async with contextlib.aclosing(_child(folder, left_s)) as lines:
                    async for line in lines:
                        if line.error:
                            raise Refused(line.error)
                        if line.plan is not None:
                            plan = line.plan
                            yield _estimate(asked, plan, now)
                        elif line.progress is not None:
                            yield line.progress
                        elif line.found is not None and plan is not None:
                            took = time.monotonic() - began
                            yield await asyncio.to_thread(self._result, asked, plan, line, rows, took, now)
                            return
            finally:
                cancelled.set()
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, True))

    # ---- what is asked ----

    def _prepare(self, request: Request, now: datetime) -> "_Asked":
        if self._store.exchange is None:
            raise Refused("this collector keeps its store in memory: there is no place to replay from")
        rule = self._rule(request)
        settings = self._own_settings(rule, request.limits)
        policy = Policy.of(rule, settings)
        until = min(request.until, now)
        if request.since >= until:
            raise Refused("the time to replay is empty: --since must be before --until")
        if not (math.isfinite(request.step_s) and 0 <= request.step_s <= 86400):
            raise Refused("a step is more than 0 s and at most 1 day")
        limit = request.timeout_s if math.isfinite(request.timeout_s) and request.timeout_s > 0 else 0.0
        found = reads(rule)
        tables = sorted((self._store.tables.keys() | _HISTORY.keys() | _RECEIVED.keys()) & found.words)
        if policy.boot_grace and "host" in self._store.tables and "host" not in tables:
            tables.append("host")
        lookback = timedelta(seconds=max(LEAST_LOOKBACK_S, found.lookback_s))
        allowed_s = min(limit or DEFAULT_SECONDS, MAX_SECONDS)
        return _Asked(request, rule, policy, settings, tables, lookback, until, allowed_s)

    def _rule(self, request: Request) -> Rule:
        """The collector's own rule of that name, or the one in the text, checked like SQL of people."""
        if not request.text:
            rule = self._rules.get(request.rule)
            if rule is None:
                known = ", ".join(sorted(self._rules))
                raise Refused(
                    f"no rule {request.rule!r}\nthere are {known}; a file needs its path, with .sql"
                )
            return rule
        if len(request.text.encode(errors="replace")) > MAX_TEXT_BYTES or "\0" in request.text:
            raise Refused(f"{request.rule}: a rule is text of at most {MAX_TEXT_BYTES} bytes")
        made = re.search(r"\bmacro\s+find_(\w+)\s*\(", request.text, re.IGNORECASE)
        name = made[1] if made else request.rule
        if not _NAME.fullmatch(name):
            raise Refused(f"{name!r:.80} is no name for a rule: small letters, digits and _")
        try:
            rule = parse_rule(name, request.text)
        except (ConfigError, RecursionError) as error:
            raise Refused(str(error)) from error
        with self._store.reader() as cursor:
            return checked(cursor, rule)

    def _own_settings(self, rule: Rule, over: Mapping[str, float]) -> JudgeSettings:
        """What the site says of this rule alone, and the caller's limits instead of every layer's."""
        for name, value in over.items():
            if name not in rule.header.limits:
                known = ", ".join(rule.header.limits) or "none"
                raise Refused(f"rule {rule.name} has no limit {name!r:.80}: there are {known}")
            if not math.isfinite(value):
                raise Refused(f"limit {name} must be a number")

        def own(limits: Limits) -> Limits:
            kept = {key: one for key, one in limits.get(rule.name, {}).items() if key not in over}
            return {rule.name: kept} if kept else {}

        site = own(self._settings.limit).get(rule.name, {})
        site |= {name: Limit(value=value, source="--limit") for name, value in over.items()}
        settings = JudgeSettings(
            judge=JudgeOptions(rule_timeout=self._settings.judge.rule_timeout),
            limit={rule.name: site} if site else {},
            model={name: Scope(limit=own(scope.limit)) for name, scope in self._settings.model.items()},
            node={name: Scope(limit=own(scope.limit)) for name, scope in self._settings.node.items()},
            rule={
                name: msgspec.structs.replace(one, enabled=True)
                for name, one in self._settings.rule.items()
                if name == rule.name
            },
        )
        try:
            check_settings(settings, [rule])
        except ConfigError as error:
            raise Refused(str(error)) from error
        return settings

    # ---- rows ----

    def _folder(self) -> Path:
        assert self._store.exchange is not None
        self._store.exchange.mkdir(mode=0o700, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="replay-", dir=self._store.exchange))

    def _export(self, asked: "_Asked", folder: Path, cancelled: threading.Event) -> int:
        """Write rows and the job into the folder; returns how many rows are of samples and events."""
        with self._store.reader(LIVE) as read, sandbox.watch(read, asked.seconds, cancelled):
            try:
                asked.since = self._begins(read, asked)
                spans = {table: self._span(asked, table) for table in asked.tables}
                total = 0
                for table, (column, begin) in spans.items():
                    counted = read.execute(
                        f'SELECT count(*) FROM "{table}" WHERE {column} >= ? AND {column} <= ?',
                        [begin, asked.until],
                    ).fetchone()
                    total += counted[0] if counted else 0
                _room(self._store.path.parent, total, asked)
                rows = folder / "rows"
                for table in _WHOLE:
                    _copy(read, f'SELECT * FROM "{table}"', rows / table, 0)
                for table, (column, begin) in spans.items():
                    self._copy_span(read, table, column, begin, asked.until, rows / table)
            except duckdb.InterruptException as error:
                raise TimedOut(f"time limit of {asked.seconds:g} s reached while reading rows") from error
        job = Job(
            rule=asked.rule.name, text=asked.rule.sql, settings=asked.settings, since=asked.since,
            until=asked.until, every_s=asked.policy.every_s,
            phase_s=self._phases.get(asked.rule.name, timedelta(0)).total_seconds(),
            step_s=asked.request.step_s, budget_s=asked.seconds * 0.9, as_known=asked.request.as_known,
            probes={
                probe: [(name, kind.name) for name, kind in columns.items()]
                for probe, columns in self._store.tables.items()
            },
            tables=[*_WHOLE, *asked.tables], received=asked.tables,
        )  # fmt: skip
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        return total

    def _begins(self, read: duckdb.DuckDBPyConnection, asked: "_Asked") -> datetime:
        """Where there is something to judge: `since`, or the first of the rows that are sampled."""
        sampled = [table for table in asked.tables if table not in _HISTORY] or asked.tables
        oldest: list[datetime] = []
        for table in sampled:
            column = _RECEIVED.get(table, "ts")
            row = read.execute(
                f'SELECT min({column}) FROM "{table}" WHERE {column} >= ?', [asked.request.since]
            ).fetchone()
            oldest += [row[0]] if row and row[0] is not None else []
        if asked.tables and not oldest:
            names = ", ".join(sampled)
            raise Refused(f"no rows of {names} since {asked.request.since}: nothing to replay")
        begin = max(asked.request.since, min(oldest, default=asked.request.since))
        if begin >= asked.until:
            raise Refused(f"the first rows are of {begin}: nothing to replay before {asked.until}")
        return begin

    @staticmethod
    def _span(asked: "_Asked", table: str) -> tuple[str, datetime]:
        if table in _HISTORY:
            return _HISTORY[table], datetime(1970, 1, 1)
        return _RECEIVED.get(table, "ts"), asked.since - asked.lookback

    @staticmethod
    def _copy_span(
        read: duckdb.DuckDBPyConnection,
        table: str,
        column: str,
        begin: datetime,
        until: datetime,
        folder: Path,
    ) -> None:
        """An hour at a time: no copy takes long, none holds many rows."""
        row = read.execute(f'SELECT min({column}) FROM "{table}" WHERE {column} >= ?', [begin]).fetchone()
        first = row[0] if row and row[0] is not None else until
        _copy(read, f'SELECT * FROM "{table}" WHERE false', folder, 0)
        if table in _HISTORY:
            _copy(read, f"SELECT * FROM \"{table}\" WHERE {column} <= TIMESTAMP '{until}'", folder, 1)
            return
        at, number = max(begin, first), 1
        while at <= until:
            upto = at + timedelta(hours=1)
            end = f"< TIMESTAMP '{upto}'" if upto <= until else f"<= TIMESTAMP '{until}'"
            _copy(
                read,
                f"SELECT * FROM \"{table}\" WHERE {column} >= TIMESTAMP '{at}' AND {column} {end}",
                folder,
                number,
            )
            at, number = upto, number + 1

    # ---- the answer ----

    def _result(
        self, asked: "_Asked", plan: Plan, line: Line, rows: int, took: float, now: datetime
    ) -> Document:
        found = line.found or []
        with self._store.reader(LIVE) as read:
            raised = documents.rows(read, _RAISED, [asked.rule.name, asked.since, asked.until])
            nodes = {one.node for one in found} | {str(one["node"]) for one in raised}
            where = documents.places(read, now, nodes)
        items = _compared(found, raised, asked, plan)
        for item in items:
            item["place"] = documents.place_of(item, where)
        count = {word: sum(item["compared"] == word for item in items) for word in COMPARED}
        return documents.document(
            "Replay",
            now,
            items,
            **_head(asked, plan),
            judged_rows=rows,
            took_s=round(took, 1),
            truncated=line.truncated,
            known_rule=asked.rule.name in self._rules,
            last_verdicts=line.counts,
            totals={"replayed": len(found), "raised": len(raised), **count},
            entities=_per_entity(items),
            notes=_notes(asked, plan),
        )


@dataclass(slots=True)
class _Asked:
    request: Request
    rule: Rule
    policy: Policy
    settings: JudgeSettings
    tables: list[str]
    lookback: timedelta
    until: datetime
    seconds: float
    since: datetime = datetime.min


def checked(cursor: duckdb.DuckDBPyConnection, rule: Rule) -> Rule:
    """The same rule, made of macros alone, each of a SELECT (or an expression) that people may run.

    Raises:
        Refused: It is more, or does what people may not do.
    """
    header = rule.sql[: rule.sql.index("*/") + 2]
    try:
        statements = [one.query for one in cursor.extract_statements(rule.sql[len(header) :])]
        found = [_MACRO.fullmatch(text) for text in statements]
        macros = [one for one in found if one]
        if len(macros) < len(found) or sum(one[1].lower() == f"find_{rule.name}" for one in macros) != 1:
            raise Refused(
                f"after its header the file must make find_{rule.name}(as_of), and macros that it uses, "
                "and nothing else"
            )
        own = frozenset(one[1].lower() for one in macros)
        taken = own & _built_in(cursor)
        if taken:
            raise Refused(f"{min(taken)} is the name of a function of DuckDB: take another")
        # a value of any size ends the child, which is bounded, not the collector
        may = own | sandbox.GROWING_FUNCTIONS
        parts = [_checked_macro(cursor, one, may) for one in macros]
    except Refused as error:
        raise Refused(f"rule {rule.name}: {error}") from error
    except (duckdb.Error, RecursionError) as error:
        text = " ".join(str(error).split())[:300] or "it is nested too deeply"
        raise Refused(f"rule {rule.name}: {text}") from error
    return Rule(rule.name, rule.header, "\n".join([header, *parts]))


_MACRO = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*create\s+(?:or\s+replace\s+)?macro\s+(\w+)\s*\(([\w\s,]*)\)\s*as\b(\s*table\b)?(.*)",
    re.DOTALL | re.IGNORECASE,
)


def _built_in(cursor: duckdb.DuckDBPyConnection) -> frozenset[str]:
    rows = cursor.execute("SELECT DISTINCT lower(function_name) FROM duckdb_functions() WHERE internal")
    return frozenset(name for (name,) in rows.fetchall()) | sandbox.DENIED_FUNCTIONS


def _checked_macro(cursor: duckdb.DuckDBPyConnection, macro: re.Match[str], may: frozenset[str]) -> str:
    """The macro's statement again, of what was checked."""
    name, parameters, table, body = macro.groups()
    head = f"create or replace macro {name}({parameters}) as"
    if table:
        return f"{head} table\n{sandbox.check(cursor, body, may).sql}\n;"
    scalar = sandbox.check(cursor, f"SELECT (\n{body.rstrip().rstrip(';')}\n)", may).sql
    return f"{head} {scalar.removeprefix('SELECT ')};"


def _room(directory: Path, rows: int, asked: _Asked) -> None:
    """Refuse what would fill the disk, or takes too many rows."""
    if rows > MAX_ROWS:
        hours = (asked.until - asked.since).total_seconds() / 3600
        raise Refused(
            f"{rows} rows in {hours:.3g} h, more than {MAX_ROWS}: narrow the time to about "
            f"{hours * MAX_ROWS / rows:.2g} h"
        )
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if rows * ROW_BYTES > free / 4:
        raise Refused(
            f"{rows} rows need up to {rows * ROW_BYTES >> 20} MiB: the disk has {free >> 20} MiB free"
        )


def _copy(read: duckdb.DuckDBPyConnection, select: str, folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = str(folder / f"{number:05}.parquet").replace("'", "''")
    read.execute(f"COPY ({select}) TO '{file}' (FORMAT parquet, COMPRESSION zstd)")


async def _child(folder: Path, left_s: float) -> AsyncGenerator[Line, None]:
    """What the child says; it is killed when its time is over, or nobody listens any more."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gpufleet_collector.replay_child", str(folder),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        limit=64 << 20,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(max(1.0, left_s)):
            while text := await process.stdout.readline():
                yield msgspec.json.decode(text, type=Line)
            await process.wait()
        told = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
        log.warning("replay: the child ended with %s: %s", process.returncode, told[-1:] or "")
        raise Refused(f"the replay was ended ({_why(process.returncode, told)})")
    except TimeoutError as error:
        raise TimedOut("the replay passed its time limit: give --max-seconds, or less time") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(process.communicate())


def _why(code: int | None, told: Sequence[str]) -> str:
    if code is not None and code < 0:
        return f"signal {-code}: it may have needed too much memory or processor"
    return (told[-1] if told else f"exit {code}")[:300]


_RAISED = """
    SELECT node, entity, state, verdict, code, observed, expected, unit, reason,
           evidence::VARCHAR AS evidence, began_at, fired_at, resolved_at
    FROM finding
    WHERE rule = ? AND fired_at IS NOT NULL AND coalesce(resolved_at, 'infinity') >= ? AND fired_at <= ?
    ORDER BY fired_at, node, entity LIMIT 10000
"""

COMPARED = ("both", "replay_only", "raised_only")


def _compared(found: Sequence[Found], raised: Sequence[Row], asked: _Asked, plan: Plan) -> list[Row]:
    """Findings of the replay and of the judge, and which of them are the same: one entity at one time."""
    slack = timedelta(seconds=plan.step_s + asked.policy.every_s)
    real: dict[tuple[str, str], list[Row]] = {}
    for row in raised:
        real.setdefault((str(row["node"]), str(row["entity"])), []).append(row)
    matched: set[int] = set()
    items: list[Row] = []
    for one in found:
        same = [
            row
            for row in real.get((one.node, one.entity), ())
            if _moment(row["began_at"]) - slack <= (one.resolved_at or asked.until)
            and one.began_at - slack <= _moment(row["resolved_at"] or asked.until)
        ]
        matched |= {id(row) for row in same}
        items.append(_item(msgspec.structs.asdict(one), "both" if same else "replay_only"))
    items += [_item(row, "raised_only") for row in raised if id(row) not in matched]
    return sorted(items, key=lambda item: (str(item["fired_at"]), str(item["node"]), str(item["entity"])))


def _moment(value: object) -> datetime:
    assert isinstance(value, datetime)
    return value


def _item(row: Mapping[str, object], compared: str) -> Row:
    times = {name: iso(row[name]) for name in ("began_at", "fired_at", "resolved_at")}
    return {
        **{name: row[name] for name in ("node", "entity", "state", "verdict", "code")},
        **{name: sandbox.plain(row[name]) for name in ("observed", "expected")},
        **{name: row[name] for name in ("unit", "reason")},
        **times,
        "evidence": documents.evidence(row["evidence"]),
        "compared": compared,
    }


def _per_entity(items: Collection[Row]) -> list[Row]:
    totals: dict[tuple[str, str], Row] = {}
    for item in items:
        key = (str(item["node"]), str(item["entity"]))
        one = totals.setdefault(
            key,
            {"node": key[0], "entity": key[1], "place": item["place"], "replayed": 0, "raised": 0},
        )
        for word, counted in (("replayed", "raised_only"), ("raised", "replay_only")):
            one[word] = int(str(one[word])) + (item["compared"] != counted)
    return sorted(totals.values(), key=lambda one: (-int(str(one["replayed"])), str(one["place"])))


def _head(asked: _Asked, plan: Plan) -> Row:
    return {
        "rule": asked.rule.name,
        "from_file": bool(asked.request.text),
        "asked_since": iso(asked.request.since),
        "since": iso(asked.since),
        "until": iso(asked.until),
        "as_known": asked.request.as_known,
        "for": f"{asked.policy.need.k} of {asked.policy.need.n}",
        "every_s": asked.policy.every_s,
        "step_s": plan.step_s,
        "passes": plan.passes,
        "rows": plan.rows,
        "estimated_s": plan.seconds,
        "limits": dict(asked.request.limits),
    }


def _estimate(asked: _Asked, plan: Plan, now: datetime) -> Document:
    return documents.document("ReplayEstimate", now, [], **_head(asked, plan))


def _notes(asked: _Asked, plan: Plan) -> list[str]:
    """What a reader must know to believe the numbers."""
    notes = []
    if asked.since > asked.request.since:
        notes.append(f"the first rows are of {iso(asked.since)}: nothing older is stored")
    if plan.step_s > asked.policy.every_s:
        notes.append(
            f"a pass every {plan.step_s:g} s instead of {asked.policy.every_s:g} s: "
            "evidence that is gone by the next pass is not seen"
        )
    if "baseline" in reads(asked.rule).words:
        notes.append("baselines are those of now")
    notes.append("findings that began before the replayed time begin anew with it")
    return notes
