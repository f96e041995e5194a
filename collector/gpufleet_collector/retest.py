"""Suspects are measured again: a card that one run showed slow is let go in minutes, or known in an hour.

A suspect is a pending finding of `bandwidth_regression`. Its agent is asked for another run of that bench on
that card five minutes after the newest one, each through the agent's own gate and budget; one that brings no
result is tried again after twice as long. What was asked stands in table `audit`: a restarted collector goes
on where it was.

What disturbs a card once mostly does so for longer than minutes, and a gate that missed it misses it again.
So five minutes are enough for a run that may clear the card, and not for the one that makes a finding of it:
that one comes an hour later, or with the next round. Cards of a host that fell at once, be it two of them,
are not measured again at all: that is the host's trouble, and its rule counts only rounds that were not asked
for. Nor are cards of a host that people work on.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from gpufleet_collector.bench_runs import BenchRuns, new_lease
from gpufleet_collector.people import NotNow, Who, audit
from gpufleet_collector.store import LIVE, Store

log = logging.getLogger(__name__)

AFTER = timedelta(minutes=5)
"""Runs that are nearer to each other surely show the same disturbance."""

JITTER_S = 60.0
LONGEST = timedelta(hours=1)
"""Between tries; and before a run that would be the last that a finding needs."""
LOOK_S = 5.0
VERB = "bench retest"

COLLECTOR = Who("collector", False)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A card to be measured again.

    Attributes:
        node: Where it is.
        entity: The card.
        bench: What showed it slow.
        due: When.
        tries: How often it was asked for since the newest evidence.
    """

    node: str
    entity: str
    bench: str
    due: datetime
    tries: int

    @property
    def target(self) -> str:
        """As the audit names it."""
        return f"{self.node} {self.entity} {self.bench}"


def suspects(read: duckdb.DuckDBPyConnection, now: datetime) -> list[Suspect]:
    """Every suspect, the one that is due first before the others."""
    rows = read.execute(_SUSPECTS, {"now": now, "verb": VERB}).fetchall()
    found = []
    for node, entity, bench, shown_at, asked_at, tries, decisive, dice in rows:
        wait = LONGEST if decisive else min(AFTER * 2 ** min(tries, 10), LONGEST)
        since = max(one for one in (shown_at, asked_at) if one is not None)
        found.append(Suspect(node, entity, bench, since + wait + timedelta(seconds=JITTER_S * dice), tries))
    return sorted(found, key=lambda one: (one.due, one.node, one.entity))


def lately(read: duckdb.DuckDBPyConnection, now: datetime) -> int:
    """How many were asked for in the last minute."""
    row = read.execute(
        "SELECT count(*) FROM audit WHERE verb = ? AND logged_at > ?::TIMESTAMP - INTERVAL 1 MINUTE",
        [VERB, now],
    ).fetchone()
    return int(row[0]) if row else 0


class Retests:
    """Asks agents to measure suspects again.

    Args:
        store: Where findings are.
        runs: Who asks agents.
        per_minute: Most of the whole fleet; 0 = none at all.
        now: Collector's clock, naive UTC.
    """

    def __init__(self, store: Store, runs: BenchRuns, per_minute: int, now: Callable[[], datetime]) -> None:
        self._store = store
        self._runs = runs
        self._per_minute = per_minute
        self._now = now

    async def run(self) -> None:
        """Until it is cancelled."""
        said = ""
        while self._per_minute:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
                said = ""
            except Exception as error:  # the store may be busy or closed; the next look may work
                text = f"{type(error).__name__}: {error}"
                if text != said:
                    log.warning("suspects cannot be measured again: %s", text)
                said = text

    async def look(self) -> list[Suspect]:
        """Ask for those that are due; returns them."""
        now = self._now()
        due, room = await asyncio.to_thread(self._due, now)
        asked: list[Suspect] = []
        for suspect in due:
            if len(asked) >= room:
                break
            # a node that is busy or away is asked at a later look; nothing was used up
            if self._runs.busy(suspect.node) or not self._runs.connected(suspect.node):
                continue
            lease = new_lease("retest")
            try:
                run = self._runs.reserve(suspect.node, "the collector, to confirm a suspect", person=False)
            except NotNow:
                continue
            try:
                await asyncio.to_thread(self._note, suspect, lease, now)
            except BaseException:
                self._runs.release(run)
                raise
            self._runs.start(run, suspect.entity, [suspect.bench], [lease])
            asked.append(suspect)
        return asked

    def _due(self, now: datetime) -> tuple[list[Suspect], int]:
        if "bench" not in self._store.tables:
            return [], 0
        with self._store.reader(LIVE) as read:
            found = [one for one in suspects(read, now) if one.due <= now]
            return found, self._per_minute - lately(read, now) if found else 0

    def _note(self, suspect: Suspect, lease: str, now: datetime) -> None:
        args = {"lease": lease, "try": suspect.tries + 1}
        with self._store.transaction() as write:
            audit(write, now, COLLECTOR, VERB, suspect.target, args)


_SUSPECTS = """
with pending as (
    select f.id, f.node, f.entity, f.last_evidence_at, try_cast(f.detail as json) ->> '$.bench' as bench,
           len(list_filter(json_extract_string(f.evidence, '$[*][1]'), lambda verdict: verdict <> 'ok'))
               >= if(f.code = 'below_floor', 1, 2) as decisive
    from finding f
    where f.rule = 'bandwidth_regression' and f.state = 'pending' and f.entity like 'gpu:%'
      and not exists (from finding h where h.rule = 'bandwidth_regression_host' and h.node = f.node
                      and h.state <> 'resolved')
      and f.node not in (select node from maintenance_at($now))
),
-- one card of its host; of a pair, both ends may show it
suspect as (from pending qualify count(*) over (partition by node, bench) = 1 or bench = 'p2p'),
ran as (
    select s.id, max(r.ts) as ran_at
    from suspect s join bench_samples() r on r.node = s.node and r.entity = s.entity and r.bench = s.bench
    where r.status = 'ok' and r.ts > s.last_evidence_at - interval 1 minute and r.ts <= $now
    group by s.id
),
asked as (
    select s.id, max(a.logged_at) as asked_at, count(*) as tries
    from suspect s join audit a on a.target = s.node || ' ' || s.entity || ' ' || s.bench
    where a.verb = $verb and a.logged_at > s.last_evidence_at and a.logged_at <= $now
    group by s.id
)
select s.node, s.entity, s.bench, greatest(s.last_evidence_at, r.ran_at) as shown_at, a.asked_at,
       coalesce(a.tries, 0) as tries, s.decisive,
       (hash(s.id, coalesce(a.tries, 0)) % 1000)::double / 1000 as dice
from suspect s left join ran r using (id) left join asked a using (id)
where s.bench is not null and s.bench <> ''
"""
