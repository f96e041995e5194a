"""What grows is kept in bounds: old rows leave the tables, and reading stops before the disk is full."""

import asyncio
import logging
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from gpufleet_collector.config import DiskConfig, RetentionConfig
from gpufleet_collector.state import from_us, now_us
from gpufleet_collector.store import Store, StoreBroken

log = logging.getLogger(__name__)

LEDGER = timedelta(days=8)
"""Longer than any agent keeps its spool."""

_HISTORY_PROBES = frozenset({"bench"})
_HISTORY = {
    "event": "ts",
    "quarantine": "received_at",
    "finding": "resolved_at",
    "incident": "resolved_at",
    "inventory": "valid_to",
}
"""Tables that rules and people read over long spans, and the time that makes a row old (NULL = it is not)."""


class Retention:
    """Deletes what is older than the configuration says."""

    def __init__(self, store: Store, config: RetentionConfig) -> None:
        self._store = store
        self._config = config

    async def run(self) -> None:
        """For ever, every `every_minutes`."""
        while True:
            await asyncio.sleep(self._config.every_minutes * 60)
            try:
                await asyncio.to_thread(self.expire, from_us(now_us()))
            except StoreBroken:
                log.debug("retention: the store is broken, next time")
            except Exception:
                log.exception("retention failed")

    def expire(self, now: datetime) -> int:
        """Delete every row that is old at `now`, then give its space back. Returns how many.

        One transaction per table, so that ingest waits for one table at most.
        """
        hot = now - timedelta(hours=self._config.hot_hours)
        history = now - timedelta(days=self._config.history_days)
        plan = [(probe, "ts", history if probe in _HISTORY_PROBES else hot) for probe in self._store.tables]
        plan += [(table, column, history) for table, column in _HISTORY.items()]
        plan.append(("ledger", "received_at", now - LEDGER))
        deleted = 0
        for table, column, before in plan:
            with self._store.transaction() as write:
                row = write.execute(f'DELETE FROM live."{table}" WHERE {column} < ?', [before]).fetchone()
                deleted += row[0] if row else 0
        if deleted:
            self._store.checkpoint()
            log.info("retention: %d rows deleted", deleted)
        return deleted


class DiskWatch:
    """Stops ingest when the disk runs short, and lets it go on when there is room again."""

    def __init__(self, directory: Path, config: DiskConfig, pause: Callable[[str], None]) -> None:
        self._directory = directory
        self._config = config
        self._pause = pause
        self._short = False

    async def run(self) -> None:
        """For ever, every `check_s`."""
        while True:
            self.look()
            await asyncio.sleep(self._config.check_s)

    def look(self) -> None:
        """Once: pause or go on."""
        try:
            disk = os.statvfs(self._directory)
        except OSError:
            return
        free = disk.f_bavail * disk.f_frsize
        floor = min(
            self._config.floor_mib * 1024 * 1024,
            self._config.floor_pct / 100 * disk.f_blocks * disk.f_frsize,
        )
        short = free < floor * (1.1 if self._short else 1.0)
        if short != self._short:
            self._short = short
            self._pause("disk_floor" if short else "")
