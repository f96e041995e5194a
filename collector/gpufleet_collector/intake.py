"""Between the streams and the committer: a bounded queue with two lanes, and the thread that empties it.

What happens now is committed before what an outage left behind. A full queue stops the reading of streams,
and so in the end the agents, which keep their spools.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from gpufleet.v1 import ingest_pb2 as pb
from gpufleet_collector.commit import Batch, Commits, Denial, Item, Outcome, Session
from gpufleet_collector.state import State, now_us
from gpufleet_collector.store import Store, StoreBroken, StoreUnusable

log = logging.getLogger(__name__)

_OVERHEAD = 512
"""What an item weighs besides its body."""

_LONGEST_PAUSE_S = 5.0
_PAUSE_AFTER_SURPRISE_S = 1.0


class Intake:
    """The queue. `put` belongs to the event loop, `take` to the committer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lane_bytes: int, group_bytes: int) -> None:
        self._loop = loop
        self._lane_bytes = lane_bytes
        self._group_bytes = group_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._control: deque[Session | Denial] = deque()
        self._lanes: tuple[deque[Batch], deque[Batch]] = (deque(), deque())
        self._bytes = [0, 0]
        self._waiting: list[asyncio.Future[None]] = []
        self._closed = False

    async def put(self, item: Item) -> None:
        """Queue one item; waits while its lane is full."""
        if not isinstance(item, Batch):
            with self._lock:
                self._control.append(item)
                self._changed.notify()
            return
        lane = 1 if item.lane == pb.LANE_BACKFILL else 0
        while True:
            with self._lock:
                if self._bytes[lane] < self._lane_bytes:
                    before = sum(self._bytes)
                    self._lanes[lane].append(item)
                    self._bytes[lane] += len(item.body) + _OVERHEAD
                    if before == 0 or before < self._group_bytes <= sum(self._bytes):
                        self._changed.notify()
                    return
                room = self._loop.create_future()
                self._waiting.append(room)
            await room

    def close(self) -> None:
        """No more comes: `take` gives what is left, then None."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def clear(self) -> None:
        """Throw away what is queued: its streams are being ended and nothing of it is acknowledged."""
        with self._lock:
            self._control.clear()
            for lane in self._lanes:
                lane.clear()
            self._bytes = [0, 0]
        self._make_room()

    def take(self, linger_s: float, idle_s: float) -> list[Item] | None:
        """The next group; empty after `idle_s` without any, None when closed and empty.

        Waits `linger_s` for company once there is something, so that many agents share one commit.
        """
        with self._lock:
            if not self._changed.wait_for(self._some, idle_s):
                return []
            if not self._closed:
                self._changed.wait_for(
                    lambda: self._closed or sum(self._bytes) >= self._group_bytes, linger_s
                )
            group: list[Item] = list(self._control)
            self._control.clear()
            reserve = self._group_bytes // 8 if self._lanes[1] else 0
            self._move(0, self._group_bytes - reserve, group)
            self._move(1, max(reserve, self._group_bytes - sum(_weight(item) for item in group)), group)
            done = self._closed and not group
        self._make_room()
        return None if done else group

    def _some(self) -> bool:
        return bool(self._closed or self._control or self._lanes[0] or self._lanes[1])

    def _move(self, lane: int, room: int, group: list[Item]) -> None:
        queue = self._lanes[lane]
        while queue and room > 0:
            batch = queue.popleft()
            weight = _weight(batch)
            room -= weight
            self._bytes[lane] -= weight
            group.append(batch)

    def _make_room(self) -> None:
        if self._waiting:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(None)


def _weight(item: Item) -> int:
    return len(item.body) + _OVERHEAD if isinstance(item, Batch) else _OVERHEAD


class Committer(threading.Thread):
    """Takes groups, commits them, hands outcomes back to the loop; opens the store again when it broke."""

    def __init__(
        self,
        store: Store,
        state: State,
        intake: Intake,
        linger_s: float,
        deliver: Callable[[Outcome], None],
    ) -> None:
        super().__init__(name="committer", daemon=True)
        self.progress = time.monotonic()
        """When it last got on; the watchdog looks here."""
        self.failed = False
        """It ended by an error that nobody foresaw."""
        self._store = store
        self._state = state
        self._intake = intake
        self._linger_s = linger_s
        self._deliver = deliver
        self._gone: deque[Session] = deque()
        self._stopping = threading.Event()
        try:
            self._commits = Commits(store, state)
        except StoreBroken:
            store.reopen()
            self._commits = Commits(store, state)
        if store.replaced:
            self._commits.tell("store_replaced", now_us(), store.replaced)

    def gone(self, session: Session) -> None:
        """A stream ended; from any thread."""
        session.open = False
        self._gone.append(session)

    def stop(self) -> None:
        """Commit what is queued, then end."""
        self._stopping.set()
        self._intake.close()

    def run(self) -> None:
        """Until `stop`."""
        try:
            while (group := self._intake.take(self._linger_s, idle_s=1.0)) is not None:
                self.progress = time.monotonic()
                while self._gone:
                    self._commits.gone(self._gone.popleft())
                if group or self._store.broken:
                    self._commit(group)
        except _Abandoned:
            log.error("stopped while the store was broken: what was not acknowledged comes again")
        except BaseException as error:
            self.failed = True
            self._state.set_ready("committer", f"the committer died: {type(error).__name__}: {error}")
            log.exception("the committer died")
            raise

    def _commit(self, group: list[Item]) -> None:
        """Commit, however long it takes; readiness is red from the first failure until it is done."""
        why, pause_s = "", 0.1
        while True:
            try:
                outcome = self._commits.commit(group)
                break
            except StoreBroken as error:
                why = why or str(error)
                self._state.set_ready("store", f"store: {error}")
                if self._recover(pause_s):
                    return
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            except Exception as error:
                self._give_back(error)
                return
        self.progress = time.monotonic()
        self._deliver(outcome)
        self._state.set_ready("committer", "")
        if why:
            self._healed("store_reopened", why)

    def _give_back(self, error: Exception) -> None:
        """Nobody foresaw this: nothing of the group is acknowledged, its agents say hello and send again."""
        why = f"{type(error).__name__}: {error}"[:300]
        log.error("a group was not stored, its agents send again: %s", why, exc_info=error)
        self._state.set_ready("committer", f"the last group was not stored: {why}")
        self._deliver(Outcome(replaced=self._commits.forget()))
        self._stopping.wait(_PAUSE_AFTER_SURPRISE_S)

    def _recover(self, pause_s: float) -> bool:
        """Wait, then open the store again. Returns whether it had to begin a new file: the group is void."""
        while True:
            self.progress = time.monotonic()
            if self._stopping.wait(pause_s):
                raise _Abandoned
            try:
                self._store.reopen()
                if not self._store.replaced:
                    self._commits.load()
                    return False
                self._intake.clear()
                self._deliver(Outcome(replaced=self._commits.forget()))
                self._commits.load()
                self._healed("store_replaced", self._store.replaced)
                return True
            except (StoreUnusable, StoreBroken) as error:
                log.debug("store: not yet: %s", error)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _healed(self, kind: str, why: str) -> None:
        try:
            self._commits.tell(kind, now_us(), why)
        except StoreBroken:
            return  # the next group finds it broken again
        log.warning("store: works again")
        self._state.set_ready("store", "")


class _Abandoned(Exception):
    """Told to stop while the store could not be opened."""
