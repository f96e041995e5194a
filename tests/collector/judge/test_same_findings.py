"""Live, restarted and replayed: the same rows give the same findings, whatever happens to the cards."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.replay import Replays, Request
from gpufleet_collector.replay_child import Job, run
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import LIVE, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.collector.judge.conftest import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAMILY = ("gpu_missing", "recovery_action", "xid")
RULES = [rule for rule in load_rules() if rule.name in FAMILY]
COLUMNS = "rule, node, entity, state, verdict, code, observed, began_at, fired_at, resolved_at"

HALF_MINUTE = st.tuples(
    st.sampled_from(["ok", "ok", "lost", "hung"]),
    st.sampled_from(["none", "none", "gpu_reset", "drain_p2p"]),
    st.sampled_from(["", "", "31", "79"]),
)
"""One card for half a minute: its state, what the driver wants done, an Xid."""

CALM = (("ok", "none", ""), ("ok", "none", ""))
"""First: the first pass of a new collector runs every rule, later ones those that are due."""

HISTORY = st.lists(st.tuples(HALF_MINUTE, HALF_MINUTE), min_size=2, max_size=3)


def play(fleet: "Fleet", history: list[tuple[object, ...]], restarts: set[int]) -> Judge:
    """A pass after every five seconds of history; a new judge before those in `restarts`."""

    def start() -> Judge:
        return Judge(fleet.store, JudgeSettings(), rules=RULES)

    node = fleet.add("gpu-001", gpus=2, health=True)
    judge, passes = start(), 0
    for both in (CALM, *history):
        errors: list[tuple[str, str]] = []
        for card, said in zip(node.cards, both, strict=True):
            assert isinstance(said, tuple)
            state, action, xid = said
            card.state = state
            card.health = {"recovery_action": action}
            if xid:
                errors.append((card.pci, xid))
        node.sent = 0  # the slow probes tell of it at once
        for _ in range(6):
            if passes in restarts:
                judge = start()
            fleet.run(5)
            while errors:  # arrives before the pass of that very moment, as a replay takes it
                pci, xid = errors.pop()
                severity = "critical" if xid == "79" else "warning"
                fleet.event(node, "xid", xid, f"pci:{pci}", severity=severity)
            judge.run_pass(fleet.at)
            passes += 1
    return judge


def found(store: Store) -> list[tuple[object, ...]]:
    with store.reader(LIVE) as read:
        return read.execute(
            f"SELECT {COLUMNS} FROM finding WHERE fired_at IS NOT NULL ORDER BY {COLUMNS}"
        ).fetchall()


def replayed(fleet: "Fleet", judge: Judge) -> list[tuple[object, ...]]:
    """What `fleet replay` of each rule finds in the rows as they were known; in this process, to be quick."""
    rows: list[tuple[object, ...]] = []
    replays = Replays(fleet.store, JudgeSettings(), RULES, judge.policies)
    for rule in FAMILY:
        asked = Request(rule=rule, text="", since=fleet.at - timedelta(days=1), until=fleet.at, as_known=True)
        prepared = replays._prepare(asked, fleet.at)
        folder = replays._folder()
        replays._export(prepared, folder, threading.Event())
        *_, last = run(folder, msgspec.json.decode((folder / "job.json").read_bytes(), type=Job))
        assert last.found is not None
        names = COLUMNS.split(", ")[1:]
        rows += [(rule, *(getattr(one, name) for name in names)) for one in last.found]
    return sorted(rows, key=str)


@settings(
    max_examples=2,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(HISTORY, st.sets(st.integers(0, 23), max_size=3))
def test_rules_of_cards_find_the_same_live_restarted_and_replayed(
    tmp_path_factory: pytest.TempPathFactory,
    new_fleet: "Callable[[Path | None], Fleet]",
    history: list[tuple[object, ...]],
    restarts: set[int],
) -> None:
    live, restarted = new_fleet(tmp_path_factory.mktemp("live")), new_fleet(None)
    try:
        judge = play(live, history, set())
        play(restarted, history, restarts)
        assert found(restarted.store) == found(live.store)
        assert replayed(live, judge) == sorted(found(live.store), key=str)
    finally:
        live.store.close()
        restarted.store.close()


PAIRS = ("ok ok", "lost lost", "ok ok", "lost ok", "ok lost", "ok lost", "ok ok", "lost lost")
"""A card's state in two samples that arrive together, after a pass that saw neither and before the next."""


def play_pairs(fleet: "Fleet", restart: bool) -> Judge:
    node = fleet.add("gpu-001", gpus=2, health=True)
    fleet.run(30)
    judge = Judge(fleet.store, JudgeSettings(), rules=RULES)
    for pair in PAIRS:
        fleet.at += timedelta(seconds=5)
        judge.run_pass(fleet.at)
        fleet.at -= timedelta(seconds=0.5)
        sent = fleet.at
        for state in pair.split():
            node.cards[1].state = state
            fleet.send()
            fleet.at += timedelta(seconds=5)
        fleet.at = sent + timedelta(seconds=5.5)
        with fleet.store.transaction() as write:
            for table in ("gpu", "agent", "host", "pci", "gpu_health"):
                write.execute(
                    f"UPDATE live.{table} SET received_at = ? WHERE ts >= ?",
                    [fleet.at - timedelta(seconds=0.3), sent],
                )
        if restart:
            judge = Judge(fleet.store, JudgeSettings(), rules=RULES)
        judge.run_pass(fleet.at)
    return judge


def test_samples_that_arrive_two_at_a_time_are_found_the_same(
    tmp_path_factory: pytest.TempPathFactory, new_fleet: "Callable[[Path | None], Fleet]"
) -> None:
    live, restarted = new_fleet(tmp_path_factory.mktemp("live")), new_fleet(None)
    try:
        judge = play_pairs(live, restart=False)
        play_pairs(restarted, restart=True)
        assert len(found(live.store)) == 2, "two lost in a row, twice, and never one between good ones"
        assert found(restarted.store) == found(live.store)
        assert replayed(live, judge) == sorted(found(live.store), key=str)
    finally:
        live.store.close()
        restarted.store.close()
