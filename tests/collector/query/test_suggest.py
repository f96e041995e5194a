"""`fleet limits suggest`: what is measured in several units is not one spread."""

from datetime import datetime, timedelta
from typing import cast

import pytest

from gpufleet_collector import suggest
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeSettings
from gpufleet_collector.rules import parse_rule
from gpufleet_collector.store import LIVE, Store

MIXED = """/*
title = "Clocks of most cards, seconds of some"
scope = "gpu"
every = "10s"
for = "1 of 1"
runbook = "mixed"
*/
create or replace macro find_mixed(as_of) as table
select 'gpu-001' as node, 'gpu:' || card as entity, 'ok' as verdict, 'read' as code,
       if(card = 0, 5, 1700 + card)::double as observed, 1755::double as expected,
       if(card = 0, 's', 'MHz') as unit, as_of as evidence_at, '' as reason, '{}' as detail
from range(8) cards(card)
order by card
"""


def test_only_what_is_in_the_unit_of_most_is_compared() -> None:
    store = Store.open(None)
    rule = parse_rule("mixed", MIXED)
    judge = Judge(store, JudgeSettings(), rules=[rule])
    now = datetime(2026, 3, 1, 12)
    with store.reader(LIVE) as read:
        found = suggest.suggest(read, now, {"mixed": rule}, judge.policies, "mixed", 3600, store.tables)
    store.close()
    observed = found["observed"]
    assert isinstance(observed, dict)
    assert (found["unit"], found["entities"], observed["min"]) == ("MHz", 7, 1701)


WEAK = """/*
title = "A load that is the same at any time"
scope = "gpu"
every = "10s"
for = "1 of 1"
runbook = "weak"
[limits]
most = { value = 90, source = "made up" }
*/
create or replace macro find_weak(as_of) as table
select 'gpu-001' as node, 'gpu:' || card as entity, 'ok' as verdict, 'read' as code,
       (50 + card)::double as observed,
       90::double as expected, '%' as unit, as_of as evidence_at, '' as reason, '{}' as detail
from range(CARDS) cards(card)
where exists (from event where ts <= as_of and node = 'gpu-001')
"""


@pytest.mark.parametrize(
    ("cards", "history", "caution"),
    [
        (30, timedelta(days=2), None),
        (30, timedelta(minutes=2), "made of only 2 min of history"),
        (30, timedelta(hours=20), "made of only 20 h of history"),
        (4, timedelta(days=2), "made of only 4 entities, 160 samples"),
        (20, timedelta(days=2), "made of only 800 samples"),
    ],
)
def test_a_suggestion_of_little_says_so(cards: int, history: timedelta, caution: str | None) -> None:
    store = Store.open(None)
    rule = parse_rule("weak", WEAK.replace("CARDS", str(cards)))
    now = datetime(2026, 3, 1, 12)
    since = now - history
    with store.transaction() as write:
        write.execute(
            "INSERT INTO live.event (ts, received_at, node, boot_id, entity, kind, code, count, message, "
            "detail) VALUES ($1, $1, 'gpu-001', 'b', 'node:', 'boot', '', 1, '', '{}')",
            [since],
        )
        write.execute(
            "INSERT INTO live.node VALUES ('gpu-001', 'gpu-001', 'm', 'b', 's', '1', '', $1, $1)", [since]
        )
    judge = Judge(store, JudgeSettings(), rules=[rule])
    judge.compile(now)
    with store.reader(LIVE) as read:
        found = suggest.suggest(
            read, now, {"weak": rule}, judge.policies, "weak", 7 * 86400, {*store.tables, "event"}
        )
    store.close()
    (item,) = cast(list[dict[str, object]], found["items"])
    assert item["suggested"] is not None
    assert item["caution"] == caution
