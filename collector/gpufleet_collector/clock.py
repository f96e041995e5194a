"""What an agent's clocks are worth: the monotonic one is mapped onto ours, the wall clock judged by it.

A row says when it was read on the agent's wall clock; its body says one instant on both of the agent's
clocks; its batch says the agent's monotonic clock at sending, and the collector knows when that came. A delay
only ever makes a message late, so the smallest difference seen lately is the truth.
"""

from collections import deque
from dataclasses import dataclass, field

import duckdb

KEEP_US = 2_000_000
"""An agent's clock this close is left as it is."""

WINDOW_US = 600_000_000
_JUMP_US = 5_000_000
"""A message that was this much faster than any before is not believed until the next one says the same."""

_LONGEST_UPTIME_US = 2**52
_FORGET_US = 8 * 86_400_000_000


@dataclass(frozen=True, slots=True)
class Receipt:
    """When something came, on the collector's clocks, microseconds.

    Attributes:
        wall_us: Since the epoch, UTC.
        mono_us: A clock that nobody sets.
    """

    wall_us: int
    mono_us: int


@dataclass(slots=True)
class _Boot:
    """One boot of one node. `lags` is a monotonic queue: (received, difference), differences rising."""

    lags: deque[tuple[int, int]] = field(default_factory=deque)
    suspect: int | None = None
    offset_us: int = 0
    seen_us: int = 0


class Clocks:
    """Offsets of all agents."""

    def __init__(self) -> None:
        self._boots: dict[tuple[str, str], _Boot] = {}
        self._told: dict[str, int] = {}

    def load(self, read: duckdb.DuckDBPyConnection) -> None:
        """Last known offsets, from the ledger; what was seen since is kept."""
        rows = read.execute(
            "SELECT node, boot_id, arg_max(offset_s, received_at), epoch_us(max(received_at)) "
            "FROM live.ledger GROUP BY ALL ORDER BY 4"
        ).fetchall()
        self._told = {}
        for node, boot_id, offset_s, seen_us in rows:
            boot = self._boots.setdefault((node, boot_id), _Boot())
            if seen_us >= boot.seen_us:
                boot.offset_us, boot.seen_us = round(offset_s * 1e6), seen_us
            self._told[node] = boot.offset_us

    def seen(self, node: str, boot_id: str, sent_mono_us: int, received: Receipt) -> None:
        """A message of the running boot came; 0 = it does not say when it was sent."""
        if not 0 < sent_mono_us < _LONGEST_UPTIME_US:
            return
        boot = self._boots.setdefault((node, boot_id), _Boot())
        lags = boot.lags
        lag = received.mono_us - sent_mono_us
        jumped = bool(lags) and lag < lags[0][1] - _JUMP_US
        if jumped and (boot.suspect is None or abs(lag - boot.suspect) > _JUMP_US):
            boot.suspect = lag
            return
        boot.suspect = None
        while lags and lags[-1][1] >= lag:
            lags.pop()
        lags.append((received.mono_us, lag))
        while lags[0][0] < received.mono_us - WINDOW_US:
            lags.popleft()

    def offset_us(
        self, node: str, boot_id: str, sealed_at_us: int, sealed_mono_us: int, received: Receipt
    ) -> int:
        """What to add to the wall clock of a body to get true time; 0 when that is less than `KEEP_US`.

        A body of a boot that no longer runs gets the last offset that boot was known to have, else 0.
        """
        boot = self._boots.get((node, boot_id))
        if boot is None:
            return 0
        if boot.lags and sealed_mono_us:
            on_ours = sealed_mono_us + boot.lags[0][1]
            true_us = on_ours + received.wall_us - received.mono_us
            offset = true_us - sealed_at_us
            boot.offset_us = offset if abs(offset) > KEEP_US else 0
            boot.seen_us = received.wall_us
        return boot.offset_us

    def news(self, node: str, offset_us: int) -> bool:
        """Whether this offset is worth an event: it moved by more than the tolerance since the last one."""
        told = self._told.get(node, 0)
        if abs(offset_us - told) <= KEEP_US:
            return False
        self._told[node] = offset_us
        return True

    def rename(self, before: str, node: str) -> None:
        """A node goes by another name."""
        for key in [key for key in self._boots if key[0] == before]:
            self._boots[node, key[1]] = self._boots.pop(key)
        if before in self._told:
            self._told[node] = self._told.pop(before)

    def forget(self, now_us: int) -> None:
        """Drop boots that nothing can come from any more."""
        for key in [
            key for key, boot in self._boots.items() if boot.seen_us < now_us - _FORGET_US and not boot.lags
        ]:
            del self._boots[key]
