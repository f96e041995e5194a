"""What the CLI asks: `FleetService`. Every reply that people see is a JSON document, sent in pieces.

The event loop never runs SQL: a document is built and encoded in a thread.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import duckdb
import grpc
import msgspec

from gpufleet import WIRE_VERSION, __version__
from gpufleet.v1 import fleet_pb2, fleet_pb2_grpc
from gpufleet_collector import (
    baselines,
    bench_documents,
    bench_runs,
    coverage,
    documents,
    explain,
    inventory,
    people,
    replay,
    report,
    sandbox,
    suggest,
)
from gpufleet_collector.bench_runs import Answer, BenchRuns
from gpufleet_collector.documents import Ambiguous, Document, Health, NotFound
from gpufleet_collector.findings import Policy
from gpufleet_collector.ingest import certificate_names
from gpufleet_collector.inventory import Difference, InventoryError, NoSuchNode, NotAllowed, Pinned
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.people import Matcher, Who
from gpufleet_collector.replay import Replays
from gpufleet_collector.rules import Rule, load_rules
from gpufleet_collector.state import from_us
from gpufleet_collector.store import LIVE, Store

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10
SNAPSHOT_MIN_S = 1.0
SNAPSHOT_LOAD = 0.05
"""Share of one core that keeping the status ready may take: a larger fleet has an older one."""

ROWS_S = 60.0
"""So long after its agent's answer the rows of a run may take to be in the store."""

SQL_AT_ONCE = 2
"""Statements of people that run at once; others wait. Memory is shared with ingest."""

Context = grpc.aio.ServicerContext[object, object]
Made = TypeVar("Made")
Build = Callable[[duckdb.DuckDBPyConnection, datetime], Document]


_AS_HEADERS = JudgeSettings()

_STATUS: Mapping[type[Exception], grpc.StatusCode] = {
    NotFound: grpc.StatusCode.NOT_FOUND,
    Ambiguous: grpc.StatusCode.INVALID_ARGUMENT,
    NoSuchNode: grpc.StatusCode.NOT_FOUND,
    InventoryError: grpc.StatusCode.INVALID_ARGUMENT,
    people.NoSuch: grpc.StatusCode.NOT_FOUND,
    people.NotNow: grpc.StatusCode.FAILED_PRECONDITION,
    people.PeopleError: grpc.StatusCode.INVALID_ARGUMENT,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    sandbox.Refused: grpc.StatusCode.INVALID_ARGUMENT,
    sandbox.TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
}


_ACTS = {
    fleet_pb2.ACT_ACKNOWLEDGE: "acknowledged",
    fleet_pb2.ACT_UNACKNOWLEDGE: "unacknowledged",
    fleet_pb2.ACT_NOTE: "noted",
    fleet_pb2.ACT_CLOSE: "closed",
}

_LAST_US = 4_102_444_800_000_000
"""The year 2100."""


def utc_now() -> datetime:
    """The clock of this machine, naive UTC."""
    return datetime.now(UTC).replace(tzinfo=None)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A status document that was built `built` (monotonic seconds) and is good until `until`."""

    body: bytes
    built: float
    until: float


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """Answers the CLI from the store.

    Args:
        store: Where everything is.
        policies: How each rule's verdicts become findings (`Judge.policies`).
        health: How the collector is, right now.
        now: The collector's clock, naive UTC.
        settings: What the site says of rules and limits, for replays.
        rules: The judge's rules; None = all that come with the collector.
        runs: Who has agents run benches; None = nobody.
    """

    def __init__(
        self,
        store: Store,
        policies: Mapping[str, Policy],
        health: Callable[[], Health],
        now: Callable[[], datetime] = utc_now,
        settings: JudgeSettings = _AS_HEADERS,
        rules: Sequence[Rule] | None = None,
        runs: BenchRuns | None = None,
    ) -> None:
        self._store = store
        self._runs = runs
        self._headers = {name: explain.header(policy) for name, policy in policies.items()}
        self._health = health
        self._now = now
        self._policies = policies
        self._rules = {rule.name: rule for rule in (load_rules() if rules is None else rules)}
        self._replays = Replays(store, settings, tuple(self._rules.values()), policies)
        self._sql_slots = asyncio.Semaphore(SQL_AT_ONCE)
        self._snapshot: _Snapshot | None = None
        self._changes = 0

    async def keep_status_ready(self) -> None:
        """Build the status again and again, so that whoever asks waits for no query; runs until cancelled.

        A build that fails or hangs leaves no old answer standing: one is served for three rounds at most.
        """
        while True:
            began, changes = time.monotonic(), self._changes
            try:
                body = await asyncio.to_thread(self._build, self._status)
            except Exception as error:  # the store may be closed or broken; who asks is told so
                log.debug("status: not ready: %s", error)
                await asyncio.sleep(SNAPSHOT_MIN_S)
                continue
            took = time.monotonic() - began
            pause = max(SNAPSHOT_MIN_S, took / SNAPSHOT_LOAD)
            if changes == self._changes:
                self._snapshot = _Snapshot(body, began, began + 3 * (pause + took))
            await asyncio.sleep(pause)

    async def GetVersion(
        self, request: fleet_pb2.GetVersionRequest, context: Context
    ) -> fleet_pb2.GetVersionResponse:
        """Versions, readiness and the clock."""
        health = self._health()
        return fleet_pb2.GetVersionResponse(
            version=__version__,
            wire_version=WIRE_VERSION,
            ready=health.ready,
            reason=health.reason,
            duckdb_version=duckdb.__version__,
            now_us=int(self._now().replace(tzinfo=UTC).timestamp() * 1e6),
        )

    async def GetStatus(
        self, request: fleet_pb2.GetStatusRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.GetStatusResponse]:
        """Counters, open incidents, nodes; `snapshot_age_s` says how old the answer is."""
        now, ready = time.monotonic(), self._snapshot
        if ready is None or now > ready.until:
            body = await self._try(context, lambda: self._build(self._status))
            age = 0.0
        else:
            body, age = ready.body, now - ready.built
        for part in _parts(b'%b,"snapshot_age_s":%.3f}' % (body.removesuffix(b"}"), age)):
            yield fleet_pb2.GetStatusResponse(json=part)

    def _status(self, read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
        return documents.status(read, now, __version__, self._health())

    async def GetNode(
        self, request: fleet_pb2.GetNodeRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.GetNodeResponse]:
        """One node, or all."""
        tables = tuple(self._store.tables)

        def build(read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
            if not request.node:
                return documents.node_list(read, now)
            return documents.one_node(read, now, request.node, tables)

        async for part in self._document(context, build):
            yield fleet_pb2.GetNodeResponse(json=part)

    async def GetGpu(
        self, request: fleet_pb2.GetGpuRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.GetGpuResponse]:
        """One card."""
        async for part in self._document(
            context, lambda read, now: documents.one_card(read, now, request.gpu)
        ):
            yield fleet_pb2.GetGpuResponse(json=part)

    async def GetJob(
        self, request: fleet_pb2.GetJobRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.GetJobResponse]:
        """Who runs where now: one job, or all."""
        async for part in self._document(
            context, lambda read, now: documents.job_list(read, now, request.job)
        ):
            yield fleet_pb2.GetJobResponse(json=part)

    async def ListIncidents(
        self, request: fleet_pb2.ListIncidentsRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ListIncidentsResponse]:
        """Open incidents, or all."""

        def build(read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
            found = documents.incidents(read, now, open_only=not request.all)
            return documents.document("IncidentList", now, found)

        async for part in self._document(context, build):
            yield fleet_pb2.ListIncidentsResponse(json=part)

    async def GetIncident(
        self, request: fleet_pb2.GetIncidentRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.GetIncidentResponse]:
        """One incident."""
        async for part in self._document(
            context, lambda read, now: documents.one_incident(read, now, request.number)
        ):
            yield fleet_pb2.GetIncidentResponse(json=part)

    async def ActOnIncidents(
        self, request: fleet_pb2.ActOnIncidentsRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ActOnIncidentsResponse]:
        """Acknowledge, take that back, note, close."""
        what = _ACTS.get(request.act, "")
        if not what:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request does not say what to do")
        numbers = [min(number, 2**63 - 1) for number in request.numbers]

        def work(who: Who, now: datetime) -> Build:
            notes = people.act(self._store, numbers, what, request.text, request.for_s, who, now)
            return lambda read, at: report.acted(read, at, numbers, notes)

        async for part in self._person(context, people.ACTS[what], request.author, work):
            yield fleet_pb2.ActOnIncidentsResponse(json=part)

    async def ReportIncidents(
        self, request: fleet_pb2.ReportIncidentsRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ReportIncidentsResponse]:
        """The hand-over of a shift."""
        async for part in self._document(
            context, lambda read, now: report.handover(read, now, request.since_s)
        ):
            yield fleet_pb2.ReportIncidentsResponse(json=part)

    async def ListSilences(
        self, request: fleet_pb2.ListSilencesRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ListSilencesResponse]:
        """Silences in force."""
        async for part in self._document(context, report.silences):
            yield fleet_pb2.ListSilencesResponse(json=part)

    async def AddSilence(
        self, request: fleet_pb2.AddSilenceRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.AddSilenceResponse]:
        """Silence what matches for a while."""
        matcher = Matcher(
            tuple(request.nodes), tuple(request.rules), tuple(request.entities), tuple(request.serials)
        )

        def work(who: Who, now: datetime) -> Build:
            rules = tuple(self._headers)
            made = people.add_silence(self._store, matcher, request.for_s, request.reason, who, now, rules)
            return lambda read, at: report.silences(read, at, [made])

        async for part in self._person(context, "incidents silence", request.author, work):
            yield fleet_pb2.AddSilenceResponse(json=part)

    async def EndSilences(
        self, request: fleet_pb2.EndSilencesRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.EndSilencesResponse]:
        """End silences before their time."""
        ids = [min(number, 2**63 - 1) for number in request.ids]

        def work(who: Who, now: datetime) -> Build:
            people.end_silences(self._store, ids, who, now)
            return lambda read, at: report.silences(read, at, ids)

        async for part in self._person(context, "incidents silence end", request.author, work):
            yield fleet_pb2.EndSilencesResponse(json=part)

    async def ListMaintenance(
        self, request: fleet_pb2.ListMaintenanceRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ListMaintenanceResponse]:
        """Windows that run or will."""
        async for part in self._document(context, report.maintenance):
            yield fleet_pb2.ListMaintenanceResponse(json=part)

    async def StartMaintenance(
        self, request: fleet_pb2.StartMaintenanceRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.StartMaintenanceResponse]:
        """Open a window, now or later."""
        at_us = request.from_us
        if not 0 <= at_us < _LAST_US:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "from is no time of this century")
        begin = from_us(at_us) if at_us else None

        def work(who: Who, now: datetime) -> Build:
            made = people.start_maintenance(
                self._store, list(request.nodes), begin, request.for_s, request.reason, who, now
            )
            return lambda read, at: report.maintenance(read, at, [made])

        async for part in self._person(context, "maintenance start", request.author, work):
            yield fleet_pb2.StartMaintenanceResponse(json=part)

    async def EndMaintenance(
        self, request: fleet_pb2.EndMaintenanceRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.EndMaintenanceResponse]:
        """End windows before their time, or call coming ones off."""
        ids = [min(number, 2**63 - 1) for number in request.ids]

        def work(who: Who, now: datetime) -> Build:
            people.end_maintenance(self._store, ids, who, now)
            return lambda read, at: report.maintenance(read, at, ids)

        async for part in self._person(context, "maintenance end", request.author, work):
            yield fleet_pb2.EndMaintenanceResponse(json=part)

    async def ListInventory(
        self, request: fleet_pb2.ListInventoryRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ListInventoryResponse]:
        """Expected beside seen."""
        async for part in self._document(
            context,
            lambda read, now: documents.inventory_list(read, now, request.node, self._differences(now)),
        ):
            yield fleet_pb2.ListInventoryResponse(json=part)

    async def DiffInventory(
        self, request: fleet_pb2.DiffInventoryRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.DiffInventoryResponse]:
        """Only what differs."""

        def build(read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
            found = documents.inventory_list(read, now, request.node, self._differences(now))
            return documents.only_differences(found)

        async for part in self._document(context, build):
            yield fleet_pb2.DiffInventoryResponse(json=part)

    async def AcceptInventory(
        self, request: fleet_pb2.AcceptInventoryRequest, context: Context
    ) -> fleet_pb2.AcceptInventoryResponse:
        """Pin what is seen now."""

        def work(author: str, claimed: str) -> Pinned:
            return inventory.accept(
                self._store, list(request.nodes), author, request.reason, self._now(), context.peer(), claimed
            )

        done = await self._pin(context, "inventory accept", request.author, work)
        return fleet_pb2.AcceptInventoryResponse(nodes=done.nodes, gpus=done.gpus, baselines=done.baselines)

    async def ImportInventory(
        self, request: fleet_pb2.ImportInventoryRequest, context: Context
    ) -> fleet_pb2.ImportInventoryResponse:
        """Pin a delivery list."""

        def work(author: str, claimed: str) -> Pinned:
            return inventory.import_csv(
                self._store, request.csv, request.baseline_csv, author, request.reason, self._now(),
                context.peer(), claimed,
            )  # fmt: skip

        done = await self._pin(context, "inventory import", request.author, work)
        return fleet_pb2.ImportInventoryResponse(nodes=done.nodes, gpus=done.gpus, baselines=done.baselines)

    async def Explain(
        self, request: fleet_pb2.ExplainRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ExplainResponse]:
        """Why something is judged as it is."""
        async for part in self._document(
            context, lambda read, now: explain.explain(read, now, request.subject, self._headers)
        ):
            yield fleet_pb2.ExplainResponse(json=part)

    async def Replay(
        self, request: fleet_pb2.ReplayRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ReplayResponse]:
        """Any rule over stored history. A caller that goes away ends it."""
        asked = replay.Request(
            rule=request.rule,
            text=request.text,
            since=_moment(request.since_us),
            until=_moment(request.until_us) if request.until_us else self._now(),
            step_s=request.step_s,
            as_known=request.as_known,
            limits=dict(request.limits),
            timeout_s=request.timeout_s,
        )
        last: Document = {}
        try:
            async with contextlib.aclosing(self._replays.run(asked, self._now())) as said:
                async for one in said:
                    if isinstance(one, float):
                        yield fleet_pb2.ReplayResponse(progress=one)
                    elif one["kind"] == "ReplayEstimate":
                        yield fleet_pb2.ReplayResponse(estimate=msgspec.json.encode(one))
                    else:
                        last = one
        except (sandbox.Refused, sandbox.TimedOut) as error:
            await context.abort(_STATUS[type(error)], str(error))
        except (duckdb.Error, OSError) as error:
            log.warning("replay failed: %s", error)
            await context.abort(grpc.StatusCode.INTERNAL, f"the store could not answer: {first_line(error)}")
        for part in _parts(await asyncio.to_thread(msgspec.json.encode, last)):
            yield fleet_pb2.ReplayResponse(json=part)

    async def GetCoverage(
        self, request: fleet_pb2.GetCoverageRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.GetCoverageResponse]:
        """What cannot be judged now, and why."""
        tables = dict(self._store.tables)

        def build(read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
            return coverage.coverage(read, now, self._rules, self._policies, list(request.nodes), tables)

        async with self._sql_slots:
            whole = await self._try(context, lambda: self._build(build))
        for part in _parts(whole):
            yield fleet_pb2.GetCoverageResponse(json=part)

    async def ListLimits(
        self, request: fleet_pb2.ListLimitsRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ListLimitsResponse]:
        """The limits that hold."""
        async for part in self._document(
            context, lambda read, now: suggest.limits(read, now, self._rules, request.rule, request.node)
        ):
            yield fleet_pb2.ListLimitsResponse(json=part)

    async def SuggestLimits(
        self, request: fleet_pb2.SuggestLimitsRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.SuggestLimitsResponse]:
        """Limits that the fleet's own data suggest."""
        tables = tuple(self._store.tables)

        def build(read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
            return suggest.suggest(
                read, now, self._rules, self._policies, request.rule, request.since_s, tables
            )

        async with self._sql_slots:
            whole = await self._try(context, lambda: self._build(build))
        for part in _parts(whole):
            yield fleet_pb2.SuggestLimitsResponse(json=part)

    async def ListBenches(
        self, request: fleet_pb2.ListBenchesRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ListBenchesResponse]:
        """Who is measured, and who is suspected."""
        async for part in self._document(context, bench_documents.overview):
            yield fleet_pb2.ListBenchesResponse(json=part)

    async def RunBench(
        self, request: fleet_pb2.RunBenchRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.RunBenchResponse]:
        """Have an agent run benches now. A caller that goes away ends nothing."""
        runs, node = self._runs, request.node
        if runs is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this collector takes no agents")
        names, peer = certificate_names(context.auth_context()), context.peer()
        who = await self._try(
            context, lambda: self._who(names, peer, "bench run", request.author, "have benches run")
        )

        def resolve() -> tuple[tuple[str, ...], str]:
            bench_runs.check_pair(node, request.peer, request.benches, request.gpu)
            with self._store.reader(LIVE) as read:
                entity = bench_documents.card_of(read, self._now(), node, request.gpu)
                if request.peer:
                    bench_documents.card_of(read, self._now(), request.peer, "")
            return bench_runs.check_names(request.benches), entity

        benches, entity = await self._try(context, resolve)
        other: bench_runs.Run | None = None
        try:
            if request.peer:
                run, other = runs.reserve_pair(node, request.peer, who.name)
            else:
                run = runs.reserve(node, who.name)
        except people.NotNow as error:
            await context.abort(_STATUS[people.NotNow], str(error))
        leases = [bench_runs.new_lease("run") for _ in benches]
        try:
            target = f"{node} {request.peer or entity}".strip()
            await asyncio.to_thread(self._note_run, who, target, benches, leases)
        except BaseException:
            runs.release(run)
            if other is not None:
                runs.release(other)
            raise
        if other is not None:
            runs.start_pair(run, other, leases[0])
        else:
            runs.start(run, entity, benches, leases)
        async for line in run.progress():
            yield fleet_pb2.RunBenchResponse(progress=line)
        for answer in run.answers:
            agent = answer.node or node
            if answer.outcome == "unsupported":
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the agent of {agent} cannot run bench {answer.bench}: {answer.message}"
                    "\nit may be older than this collector: see fleet node",
                )
            if answer.outcome == "silent":
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"{answer.message}\nresults that still come: fleet bench history {node}",
                )
            if answer.outcome == "refused" and not answer.rows:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION, f"the agent of {agent} refused: {answer.message}"
                )
        await self._until_stored(run.answers)
        async for part in self._document(
            context, lambda read, now: bench_documents.of_run(read, now, node, entity, run.answers)
        ):
            yield fleet_pb2.RunBenchResponse(json=part)

    def _note_run(self, who: Who, target: str, benches: Sequence[str], leases: Sequence[str]) -> None:
        args: dict[str, object] = {"benches": list(benches), "leases": list(leases)}
        with self._store.transaction() as write:
            people.audit(write, self._now(), who, "bench run", target, args)

    async def _until_stored(self, answers: Sequence[Answer]) -> None:
        """Wait for the rows that agents say they sent: they come by another way than the answer."""
        wanted = {answer.lease: answer.rows for answer in answers if answer.rows}
        until = time.monotonic() + ROWS_S

        def missing() -> bool:
            if "bench" not in self._store.tables:
                return bool(wanted)
            with self._store.reader(LIVE) as read:
                there = dict(
                    read.execute(
                        "SELECT lease, count(*) FROM bench WHERE lease IN (SELECT unnest(?::VARCHAR[])) "
                        "AND received_at > ?::TIMESTAMP - INTERVAL 1 HOUR GROUP BY lease",
                        [list(wanted), self._now()],
                    ).fetchall()
                )
            return any(there.get(lease, 0) < rows for lease, rows in wanted.items())

        while await asyncio.to_thread(missing) and time.monotonic() < until:
            await asyncio.sleep(0.2)

    async def GetBenchHistory(
        self, request: fleet_pb2.GetBenchHistoryRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.GetBenchHistoryResponse]:
        """Every run on a node or card."""
        async for part in self._document(
            context,
            lambda read, now: bench_documents.history(
                read, now, request.subject, request.bench, request.since_s
            ),
        ):
            yield fleet_pb2.GetBenchHistoryResponse(json=part)

    async def CompareBench(
        self, request: fleet_pb2.CompareBenchRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.CompareBenchResponse]:
        """Cards beside their past, their host and their peers."""
        async for part in self._document(
            context, lambda read, now: bench_documents.compare(read, now, request.subject, request.by)
        ):
            yield fleet_pb2.CompareBenchResponse(json=part)

    async def ListBaselines(
        self, request: fleet_pb2.ListBaselinesRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.ListBaselinesResponse]:
        """What is normal."""

        def build(read: duckdb.DuckDBPyConnection, now: datetime) -> Document:
            node, entity = bench_documents.find(read, now, request.subject) if request.subject else ("", "")
            return bench_documents.baseline_list(read, now, node, entity)

        async for part in self._document(context, build):
            yield fleet_pb2.ListBaselinesResponse(json=part)

    async def AcceptBaselines(
        self, request: fleet_pb2.AcceptBaselinesRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.AcceptBaselinesResponse]:
        """Take what benches show now as normal."""

        def work(who: Who, now: datetime) -> Build:
            with self._store.reader(LIVE) as read:
                node, entity = bench_documents.find(read, now, request.subject)
            made = baselines.accept(
                self._store, node, entity, request.bench, request.reason, request.force, who, now
            )
            return lambda read, at: bench_documents.baseline_list(read, at, node, "", made)

        async for part in self._person(context, "bench baseline accept", request.author, work):
            yield fleet_pb2.AcceptBaselinesResponse(json=part)

    async def RunSql(
        self, request: fleet_pb2.RunSqlRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.RunSqlResponse]:
        """One read-only SELECT. A caller that goes away stops it."""
        cancelled = threading.Event()
        timeout = request.timeout_s if math.isfinite(request.timeout_s) else 0.0

        def work() -> sandbox.Answer:
            return sandbox.run(self._store, request.sql, request.limit, timeout, cancelled)

        try:
            async with self._sql_slots:
                answer = await self._try(context, work)
        finally:
            cancelled.set()
        yield fleet_pb2.RunSqlResponse(
            columns=answer.columns, types=answer.types, truncated=answer.truncated and not answer.chunks
        )
        for at, chunk in enumerate(answer.chunks, 1):
            last = at == len(answer.chunks)
            yield fleet_pb2.RunSqlResponse(rows_json=chunk, truncated=answer.truncated and last)

    async def _pin(
        self, context: Context, verb: str, author: str, work: Callable[[str, str], Pinned]
    ) -> Pinned:
        """Do `work(author, claimed)`; with a certificate, its names are the author; agents are refused."""
        names = certificate_names(context.auth_context())

        def checked() -> Pinned:
            if names is None:
                return work(author, "")
            inventory.refuse_agents(self._store, names, author, verb, self._now(), context.peer())
            return work(", ".join(sorted(names))[:500] or "a certificate without a name", author)

        done = await self._try(context, checked)
        self._forget_snapshot()
        return done

    async def _person(
        self, context: Context, verb: str, author: str, work: Callable[[Who, datetime], Build]
    ) -> AsyncIterator[bytes]:
        """Do `work` for a person and give the document it names in pieces; agents are refused."""
        names, peer = certificate_names(context.auth_context()), context.peer()

        def checked() -> bytes:
            who = self._who(names, peer, verb, author, "say what people do with incidents")
            return self._build(work(who, self._now()))

        whole = await self._try(context, checked)
        self._forget_snapshot()
        for part in _parts(whole):
            yield part

    def _who(self, names: set[str] | None, peer: str, verb: str, author: str, deed: str) -> Who:
        """Who asks; not in the event loop.

        Raises:
            NotAllowed: An agent does.
        """
        said = people.one_line(author)[:200]
        if names is None:
            return Who(said or "unknown", True, "", peer)
        inventory.refuse_agents(self._store, names, said, verb, self._now(), peer, deed)
        return Who(", ".join(sorted(names))[:200] or "a certificate without a name", False, said, peer)

    def _forget_snapshot(self) -> None:
        """Whoever accepts and then looks must see it: also one that is being built now is too old."""
        self._snapshot, self._changes = None, self._changes + 1

    def _differences(self, now: datetime) -> Sequence[Difference]:
        return inventory.diff(self._store, at=now)

    async def _document(self, context: Context, build: Build) -> AsyncIterator[bytes]:
        """Build a document in a thread and give it in pieces; an error becomes a status with one text."""
        whole = await self._try(context, lambda: self._build(build))
        for part in _parts(whole):
            yield part

    def _build(self, build: Build) -> bytes:
        with self._store.reader(LIVE) as read:
            return msgspec.json.encode(build(read, self._now()))

    async def _try(self, context: Context, work: Callable[[], Made]) -> Made:
        try:
            return await asyncio.to_thread(work)
        except tuple(_STATUS) as error:
            await context.abort(_STATUS[type(error)], str(error))
        except duckdb.Error as error:
            log.warning("query failed: %s", error)
            await context.abort(grpc.StatusCode.INTERNAL, f"the store could not answer: {first_line(error)}")
        raise AssertionError("abort does not return")


def _moment(us: int) -> datetime:
    """A time of the wire; nonsense becomes the first or last day that there is."""
    try:
        return datetime(1970, 1, 1) + timedelta(microseconds=us)
    except OverflowError:
        return datetime(1970, 1, 1) if us < 0 else datetime(9999, 1, 1)


def _parts(whole: bytes) -> Iterator[bytes]:
    for start in range(0, len(whole), CHUNK_BYTES):
        yield whole[start : start + CHUNK_BYTES]


def first_line(error: Exception) -> str:
    """The first line of an error's text, at most 300 letters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
