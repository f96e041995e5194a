"""Failures of a commit: what says something about a batch, and what does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import duckdb
import pytest

from gpufleet_collector import commit
from gpufleet_collector.commit import Batch, Commits, Item, Outcome
from gpufleet_collector.store import StoreBroken

if TYPE_CHECKING:
    from tests.collector.ingest.conftest import Kit

CIRCUMSTANCES = [
    duckdb.OutOfMemoryException("failed to offload data block"),
    duckdb.TransactionException("Failed to commit: write-write conflict"),
    duckdb.InvalidInputException("Out of Memory Error: could not allocate block"),
    MemoryError(),
    OSError(5, "Input/output error"),
]


def _failing(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> list[int]:
    """The next `times` commits with a batch in them fail."""
    left = [times]
    real = Commits._commit

    def fail(self: Commits, items: Sequence[Item], poison: Mapping[int, str]) -> Outcome:
        if left[0] > 0 and not poison and any(isinstance(item, Batch) for item in items):
            left[0] -= 1
            raise error
        return real(self, items, poison)

    monkeypatch.setattr(Commits, "_commit", fail)
    monkeypatch.setattr(commit, "PAUSES_S", (0.001, 0.001))
    return left


@pytest.mark.parametrize("error", CIRCUMSTANCES)
@pytest.mark.parametrize("times", [1, 2, 7])
def test_a_batch_is_not_blamed_for_an_engine_in_need(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int
) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    left = _failing(monkeypatch, error, times)
    agent.send(1, kit.body(kit.gpu_rows()))
    agent.wait(1)
    assert left == [0]
    kit.until(lambda: not running.store.broken)
    assert running.one("SELECT count(*) FROM live.gpu") == 1
    assert running.one("SELECT count(*) FROM live.quarantine") == 0
    reopened = running.one("SELECT count(*) FROM live.event WHERE kind = 'store_reopened'")
    assert reopened == 0 or times == 7


@pytest.mark.parametrize("error", [duckdb.ConversionException("Could not convert"), ValueError("odd")])
def test_a_batch_is_blamed_for_what_it_holds(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    _failing(monkeypatch, error, 2)  # with the others, then alone
    agent.send(1, kit.body(kit.gpu_rows()))
    agent.wait(1)
    assert running.query("SELECT number, reason FROM live.quarantine") == [(1, "refused_by_store")]
    assert running.one("SELECT count(*) FROM live.gpu") == 0


def test_an_engine_that_stays_in_need_is_broken_not_obeyed(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    running = kit.start()
    agent = kit.agent(running.address).hello()
    commits = running.collector.ingest.committer._commits
    session = commits._sessions["gpu-a01"]
    _failing(monkeypatch, duckdb.OutOfMemoryException("failed to offload"), 10**6)
    with pytest.raises(StoreBroken, match="offload"):
        commits.commit([Batch(session, 1, 1, kit.body(kit.gpu_rows()), 1, session.hello.received)])
    assert agent.acked == []
