"""A replay in its own process: a store of its own, the real judge over it, one pass after the other.

`replay.py` writes a folder (`job.json`, Parquet files of rows), runs this module with its name and reads one
JSON object per line. What the rule does here harms nobody: the store is in memory, memory and files are
bounded, and the process ends when the collector's end of stdin closes.
"""

import math
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import msgspec

from gpufleet.config import ConfigError
from gpufleet.metric import Type
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.rules import one_line, parse_rule
from gpufleet_collector.sandbox import watch
from gpufleet_collector.store import LIVE, Column, Store

MEMORY_MIB = 4096
"""Address space of the child; the engine takes half of it at most."""

FILE_MIB = 1024
"""Size of each file that it may write: the engine's spill."""

MAX_FINDINGS = 10_000

STAGED = "staged"
"""Schema of rows that have not been received yet, at the time that is judged."""

LONGEST_STEP_S = 300.0
"""No replay takes longer steps by itself: it would miss what a rule sees between two of them."""

SAFETY = 1.3
"""How much dearer than the measured ones passes may be on the whole."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed; times are naive UTC.

    Attributes:
        rule: Name of the rule.
        text: Its file.
        settings: Limits and overrides of the site, of this rule alone.
        since: Time of the first pass, at the earliest.
        until: Time of the last pass, at the latest.
        every_s: How often the rule runs.
        phase_s: When in its interval.
        step_s: Between passes; 0 = `every_s`, or as many times that as `budget_s` asks for.
        budget_s: What the passes may take.
        as_known: Whether rows count from the time they were received on.
        probes: Probe tables and their columns (name, type).
        tables: Tables of which there is a folder with rows.
        received: Those of them whose rows have `received_at`.
    """

    rule: str
    text: str
    settings: JudgeSettings
    since: datetime
    until: datetime
    every_s: float
    phase_s: float
    step_s: float
    budget_s: float
    as_known: bool
    probes: dict[str, list[tuple[str, str]]]
    tables: list[str]
    received: list[str]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that fired in a replay."""

    node: str
    entity: str
    state: str
    verdict: str
    code: str
    observed: float | None
    expected: float | None
    unit: str | None
    reason: str
    evidence: list[list[str]]
    began_at: datetime
    fired_at: datetime
    resolved_at: datetime | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay will do."""

    passes: int
    step_s: float
    seconds: float
    first: datetime
    rows: int


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of what the child says: a plan, how far it is, what it found, or why it could not."""

    plan: Plan | None = None
    progress: float | None = None
    found: list[Found] | None = None
    counts: dict[str, int] = {}
    truncated: bool = False
    error: str = ""


class CannotReplay(Exception):
    """The rule or its rows do not allow it; one line says why."""


def main() -> None:
    """Replay what the folder of the command line holds."""
    _bound_myself()
    try:
        folder = Path(sys.argv[1])
        job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
        for line in run(folder, job):
            sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
            sys.stdout.buffer.flush()
    except (CannotReplay, ConfigError, ValueError, duckdb.Error, MemoryError, OSError) as error:
        sys.stdout.buffer.write(msgspec.json.encode(Line(error=one_line(error))) + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)  # the watching thread still waits for stdin


def _bound_myself() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB << 20, MEMORY_MIB << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_MIB << 20, FILE_MIB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")

    def end_with_the_collector() -> None:
        sys.stdin.buffer.read()
        os._exit(3)

    threading.Thread(target=end_with_the_collector, daemon=True).start()


def run(folder: Path, job: Job) -> Iterator[Line]:
    """Load the rows, plan, judge.

    Raises:
        CannotReplay: The rule cannot be made or failed, or takes too long.
    """
    rule = parse_rule(job.rule, job.text)
    store = Store.open(None, folder / "rows")
    try:
        rows = _load(store, job)
        judge = Judge(store, _settings(job, job.step_s or job.every_s), rules=[rule], learns=False)
        plan = _plan(store, judge, job, rows)
        yield Line(plan=plan)
        judge = Judge(store, _settings(job, plan.step_s), rules=[rule], learns=False)
        counts: dict[str, int] = {}
        told, known = time.monotonic(), datetime.min
        for n in range(plan.passes):
            as_of = plan.first + timedelta(seconds=n * plan.step_s)
            if job.as_known:
                _receive(store, job, known, as_of)
                known = as_of
            report = judge.run_pass(as_of)
            for ran in report.runs:
                if ran.status != "ok":
                    raise CannotReplay(f"rule {job.rule} at {as_of}: {ran.status}: {ran.error}")
                counts = dict(ran.counts)
            if time.monotonic() - told >= 0.5:
                told = time.monotonic()
                yield Line(progress=(n + 1) / plan.passes)
        found = _found(store)
        yield Line(found=found[:MAX_FINDINGS], truncated=len(found) > MAX_FINDINGS, counts=counts)
    finally:
        store.close()


def _settings(job: Job, step_s: float) -> JudgeSettings:
    """The judge's pace is the replay's step, so that a step is no absence."""
    pace = msgspec.structs.replace(job.settings.judge, every=f"{step_s:.6f}s")
    return msgspec.structs.replace(job.settings, judge=pace)


def _load(store: Store, job: Job) -> int:
    """Take the rows in; with `as_known` those that were received at some time wait in another schema."""
    with store.transaction() as write:
        for probe, columns in job.probes.items():
            given = [
                Column(name, Type[kind.upper()], "", "gauge", "", None, None, "") for name, kind in columns
            ]
            store.ensure_probe(write, probe, given)
        write.execute(f"CREATE SCHEMA IF NOT EXISTS {STAGED}")
    total = 0
    for table in job.tables:
        assert store.exchange is not None
        files = str(store.exchange / table / "*.parquet").replace("'", "''")
        source = f"SELECT * FROM read_parquet('{files}')"
        with store.transaction() as write:
            if job.as_known and table in job.received:
                write.execute(
                    f'CREATE TABLE {STAGED}."{table}" AS SELECT * FROM live."{table}" WHERE false; '
                    f'INSERT INTO {STAGED}."{table}" BY NAME {source}'
                )
                counted = write.execute(f'SELECT count(*) FROM {STAGED}."{table}"').fetchone()
            else:
                write.execute(f'DELETE FROM live."{table}"; INSERT INTO live."{table}" BY NAME {source}')
                counted = write.execute(f'SELECT count(*) FROM live."{table}"').fetchone()
        total += counted[0] if counted else 0
    return total


def _receive(store: Store, job: Job, after: datetime, upto: datetime) -> None:
    """Rows that arrived in this time."""
    with store.transaction() as write:
        for table in job.tables:
            if table in job.received:
                write.execute(
                    f'INSERT INTO live."{table}" SELECT * FROM {STAGED}."{table}" '
                    "WHERE received_at > ? AND received_at <= ?",
                    [after, upto],
                )


def _plan(store: Store, judge: Judge, job: Job, rows: int) -> Plan:
    """How many passes, how far apart, and what they will take.

    Raises:
        CannotReplay: More than may be.
    """
    judge.compile(job.until)
    pass_s = _measured(store, judge, job)
    step_s = job.step_s
    if not step_s:
        needed = math.ceil((job.until - job.since).total_seconds() * pass_s / job.budget_s / job.every_s)
        step_s = job.every_s * max(1, min(needed, LONGEST_STEP_S // job.every_s))
    first, passes = _passes(job, step_s)
    seconds = passes * pass_s
    if seconds > job.budget_s:
        span_s = job.budget_s / pass_s * step_s
        raise CannotReplay(
            f"{passes} passes, {step_s:g} s apart, would take about {seconds:.0f} s: more than the "
            f"{job.budget_s:.0f} s allowed: give --step or --max-seconds, or at most {span_s / 3600:.3g} h"
        )
    return Plan(passes=passes, step_s=step_s, seconds=round(seconds, 1), first=first, rows=rows)


def _passes(job: Job, step_s: float) -> tuple[datetime, int]:
    """The first pass and how many: at the times of the live judge's own, when the steps are the rule's."""
    start = datetime(1970, 1, 1) + timedelta(seconds=job.phase_s)
    behind = (job.since - start).total_seconds() % step_s
    first = job.since + timedelta(seconds=(step_s - behind) % step_s)
    if first > job.until:
        raise CannotReplay(f"no pass between {job.since} and {job.until}: widen --since, or shorten --step")
    return first, int((job.until - first).total_seconds() // step_s) + 1


def _measured(store: Store, judge: Judge, job: Job) -> float:
    """Seconds of one pass, from three of them.

    Raises:
        CannotReplay: The rule cannot be made, or fails.
    """
    with store.reader(f"{STAGED},{LIVE}") as read:
        times = []
        for share in (0.25, 0.5, 0.9):
            at = job.since + (job.until - job.since) * share
            began = time.perf_counter()
            try:
                with watch(read, job.budget_s, None):
                    read.execute(f"SELECT sum(hash(f)) FROM find_{job.rule}(TIMESTAMP '{at}') f").fetchall()
            except duckdb.InterruptException as error:
                raise CannotReplay(f"rule {job.rule}: a pass takes more than {job.budget_s:g} s") from error
            except duckdb.Error as error:
                raise CannotReplay(f"rule {job.rule}: {judge.unmade(job.rule) or one_line(error)}") from error
            times.append(time.perf_counter() - began)
    return SAFETY * statistics.median(times) + (0.012 if job.as_known else 0.008)


_FOUND = """
    SELECT node, entity, state, verdict, code, observed, expected, unit, reason, evidence::VARCHAR,
           began_at, fired_at, resolved_at
    FROM finding WHERE fired_at IS NOT NULL ORDER BY fired_at, node, entity
"""


def _found(store: Store) -> list[Found]:
    with store.reader(LIVE) as read:
        rows: Sequence[Sequence[object]] = read.execute(f"{_FOUND} LIMIT {MAX_FINDINGS + 1}").fetchall()
    names = Found.__struct_fields__
    made = [dict(zip(names, row, strict=True)) for row in rows]
    for one in made:
        one["evidence"] = msgspec.json.decode(str(one["evidence"]))
    return [msgspec.convert(one, Found) for one in made]


if __name__ == "__main__":
    main()
