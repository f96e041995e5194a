"""What people do with incidents: acknowledge, silence, maintenance windows, notes, closing with a reason.

CLI -> query -> here -> one transaction: what was done, and its row in `audit`. Only closing touches what
the judge writes, and the judge follows it (`closed`). That people know of a trouble changes no state: what
holds at a time is macros over these rows (sql/rules/02_people.sql), so that the store alone tells it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from gpufleet import hostlist
from gpufleet_collector.store import LIVE, Store

MAX_SILENCE = timedelta(days=7)
MAX_MAINTENANCE = timedelta(days=30)
MAX_AHEAD = timedelta(days=365)
MAX_ACKNOWLEDGED = timedelta(days=30)
MAX_TEXT = 2000
MAX_NAMES = 10_000
MAX_SILENCES = 1000
"""In force at once: each is compared with each finding."""

Key = tuple[str, str, str]
"""Rule, node, entity."""


class PeopleError(Exception):
    """The request cannot be done: one line, and a second one says what to do. Nothing was changed."""


class NoSuch(PeopleError):
    """It names an incident, silence, window, node, rule or card that is not there."""


class NotNow(PeopleError):
    """The state of things does not allow it."""


@dataclass(frozen=True, slots=True)
class Who:
    """Who asks.

    Attributes:
        name: Of the certificate, else what the request says.
        claimed: No certificate said it.
        said: What the request says where a certificate says who it is.
        source: Where the request came from.
    """

    name: str
    claimed: bool
    said: str = ""
    source: str = ""


ACTS = {
    "acknowledged": "incidents ack",
    "unacknowledged": "incidents unack",
    "noted": "incidents note",
    "closed": "incidents close",
}
"""What happened -> the verb that did it."""


def act(
    store: Store, numbers: Sequence[int], what: str, text: str, for_s: float, who: Who, now: datetime
) -> list[str]:
    """Do one of `ACTS` with every incident of `numbers`, or with none.

    Returns:
        What the person should know, a line each.

    Raises:
        NoSuch: An incident does not exist.
        NotNow: It is resolved, or not acknowledged.
        PeopleError: A note or reason is missing, or a duration out of bounds.
    """
    numbers = list(dict.fromkeys(numbers))
    text = one_line(text)
    if not 0 < len(numbers) <= MAX_NAMES:
        raise PeopleError("no incident given" if not numbers else "too many incidents at once")
    if not text and what in ("noted", "closed"):
        raise PeopleError("a note needs a text" if what == "noted" else "closing needs a reason")
    until = now + _span(for_s, MAX_ACKNOWLEDGED, "an acknowledgement") if for_s else None
    with store.transaction() as write, store.reader(LIVE) as read:
        _check(read, numbers, what, now)
        warnings = _still_bad(read, numbers, now) if what == "closed" else []
        _insert_acts(write, numbers, what, text, until, who, now)
        if what == "closed":
            _close(write, numbers, f"closed by {who.name}: {text}"[:500], now)
        target = ",".join(f"INC-{number}" for number in numbers)
        audit(write, now, who, ACTS[what], target, {"text": text, "until": _iso(until)})
    return warnings


def _check(read: duckdb.DuckDBPyConnection, numbers: Sequence[int], what: str, now: datetime) -> None:
    given = "SELECT unnest(?::BIGINT[])"
    states = dict(
        read.execute(f"SELECT number, state FROM incident WHERE number IN ({given})", [numbers]).fetchall()
    )
    for number in numbers:
        if number not in states:
            raise NoSuch(f"no incident INC-{number}\nsee fleet incidents list --all")
        if what != "noted" and states[number] != "open":
            raise NotNow(f"INC-{number} is resolved: there is nothing to {ACTS[what].split()[1]}")
    if what == "unacknowledged":
        held = {row[0] for row in read.execute("SELECT number FROM acks_at(?)", [now]).fetchall()}
        for number in numbers:
            if number not in held:
                raise NotNow(f"INC-{number} is not acknowledged")


def _still_bad(read: duckdb.DuckDBPyConnection, numbers: Sequence[int], now: datetime) -> list[str]:
    """A line for each finding whose newest evidence is bad: closing does not mend it."""
    rows = read.execute(
        "SELECT incident, rule, node, entity, last_evidence_at FROM finding WHERE state = 'firing' "
        "AND incident IN (SELECT unnest(?::BIGINT[])) ORDER BY incident, verdict, id LIMIT 20",
        [numbers],
    ).fetchall()
    return [
        f"INC-{number}: {rule} on {f'{node} {entity}'.strip()} still violates, by evidence of "
        f"{max(0.0, (now - seen).total_seconds()):.0f} s ago: it will come back with the next one"
        for number, rule, node, entity, seen in rows
    ]


def _insert_acts(
    write: duckdb.DuckDBPyConnection,
    numbers: Sequence[int],
    what: str,
    text: str,
    until: datetime | None,
    who: Who,
    now: datetime,
) -> None:
    write.execute(
        "INSERT INTO live.incident_act (id, number, acted_at, what, actor, claimed, text, until) "
        "SELECT nextval('live.incident_act_id'), number, ?, ?, ?, ?, ?, ? "
        "FROM (SELECT unnest(?::BIGINT[]) AS number)",
        [now, what, who.name, who.claimed, text, until, numbers],
    )


def _close(write: duckdb.DuckDBPyConnection, numbers: Sequence[int], cause: str, now: datetime) -> None:
    given = "(SELECT unnest(?::BIGINT[]))"
    sets = "state = 'resolved', resolved_at = ?, cause = ?, updated_at = ?"
    values = [now, cause, now, numbers]
    write.execute(f"UPDATE live.finding SET {sets} WHERE state <> 'resolved' AND incident IN {given}", values)
    write.execute(f"UPDATE live.incident SET {sets} WHERE number IN {given}", values)


# ---- what the judge must know ----


@dataclass(frozen=True, slots=True)
class Closed:
    """Incidents that a person closed.

    Attributes:
        act: The last act of closing that is in here.
        incidents: Number -> when and why, of those after the mark that was asked for.
        evidence: The newest evidence of each finding that was closed: only newer one may open it again.
    """

    act: int
    incidents: Mapping[int, tuple[datetime, str]]
    evidence: Mapping[Key, datetime]


def closed(read: duckdb.DuckDBPyConnection, after: int) -> Closed | None:
    """What was closed after the act `after`; None = nothing."""
    rows = read.execute(
        "SELECT a.id, a.number, a.acted_at, 'closed by ' || a.actor || ': ' || a.text "
        "FROM live.incident_act a WHERE a.what = 'closed' AND a.id > ? ORDER BY a.id",
        [after],
    ).fetchall()
    if not rows:
        return None
    evidence = read.execute(
        "SELECT f.rule, f.node, f.entity, max(f.last_evidence_at) FROM live.finding f "
        "JOIN live.incident_act a ON a.number = f.incident AND a.acted_at = f.resolved_at "
        "WHERE a.what = 'closed' GROUP BY ALL"
    ).fetchall()
    return Closed(
        rows[-1][0],
        {number: (at, cause[:500]) for _, number, at, cause in rows},
        {(rule, node, entity): seen for rule, node, entity, seen in evidence},
    )


# ---- silences ----


@dataclass(frozen=True, slots=True)
class Matcher:
    """What a silence covers: every list that is not empty must be met."""

    nodes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    entities: tuple[str, ...] = ()
    serials: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"node={hostlist.shorten(self.nodes)}"] if self.nodes else []
        for key, values in (("rule", self.rules), ("entity", self.entities), ("serial", self.serials)):
            if values:
                more = f" and {len(values) - 5} more" if len(values) > 5 else ""
                parts.append(f"{key}={','.join(values[:5])}{more}")
        return " ".join(parts)


def add_silence(
    store: Store,
    matcher: Matcher,
    for_s: float,
    reason: str,
    who: Who,
    now: datetime,
    rules: Sequence[str] = (),
) -> int:
    """Silence what matches for a while; returns the silence's number.

    Args:
        store: Where.
        matcher: What.
        for_s: How long, seconds.
        reason: Why.
        who: Who asks.
        now: Collector's clock.
        rules: Every rule there is; empty = unknown, none is refused.

    Raises:
        NoSuch: The matcher names what is not there: it would silence nothing, or the wrong thing later.
        PeopleError: It matches everything, has no reason, or is too long or too large.
    """
    matcher = Matcher(
        *(
            tuple(dict.fromkeys(one_line(name) for name in names if name.strip()))
            for names in (matcher.nodes, matcher.rules, matcher.entities, matcher.serials)
        )
    )
    names = (matcher.nodes, matcher.rules, matcher.entities, matcher.serials)
    if not any(names):
        raise PeopleError("a silence needs a matcher: node=, rule=, entity= or serial=")
    if sum(map(len, names)) > MAX_NAMES:
        raise PeopleError(f"a silence names at most {MAX_NAMES} things")
    reason = _reason(reason, "a silence")
    until = now + _span(for_s, MAX_SILENCE, "a silence")
    strange = [rule for rule in matcher.rules if rules and rule not in rules]
    if strange:
        raise NoSuch(f'no rule {strange[0]!r}\nsee fleet sql "select rule, title from rule"')
    for entity in matcher.entities:
        if not entity.partition(":")[1]:
            raise PeopleError(f"{entity!r} is no entity: write gpu:<UUID>, port:mlx5_0/1 or node:")
    with store.transaction() as write, store.reader(LIVE) as read:
        _known_nodes(read, matcher.nodes, now)
        _known_serials(read, matcher.serials)
        held = read.execute("SELECT count(*) FROM silences_at(?)", [now]).fetchone()
        if held and held[0] >= MAX_SILENCES:
            raise NotNow(
                f"{MAX_SILENCES} silences are in force\nend some first: fleet incidents silence --end"
            )
        number = _next(write, "silence_id")
        write.execute(
            "INSERT INTO live.silence (id, nodes, rules, entities, serials, reason, actor, claimed, from_at, "
            "until) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [number, *map(list, names), reason, who.name, who.claimed, now, until],
        )
        args = {"reason": reason, "until": _iso(until), "silence": number}
        audit(write, now, who, "incidents silence", str(matcher), args)
    return number


def end_silences(store: Store, numbers: Sequence[int], who: Who, now: datetime) -> None:
    """End silences before their time: all or none.

    Raises:
        NoSuch: One does not exist.
        NotNow: One is over.
    """
    with store.transaction() as write:
        _end(write, "silence", "silence", numbers, who, now)
        target = ",".join(map(str, numbers))
        audit(write, now, who, "incidents silence end", target, {})


# ---- maintenance ----


def start_maintenance(
    store: Store,
    nodes: Sequence[str],
    from_at: datetime | None,
    for_s: float,
    reason: str,
    who: Who,
    now: datetime,
) -> int:
    """Open a maintenance window on nodes, now or later; returns its number.

    Raises:
        NoSuch: A node is not known.
        PeopleError: No node, no reason, or a time out of bounds.
    """
    names = list(dict.fromkeys(nodes))
    if not 0 < len(names) <= MAX_NAMES:
        raise PeopleError("no node given" if not names else f"at most {MAX_NAMES} nodes at once")
    reason = _reason(reason, "a maintenance window")
    begin = from_at or now
    if begin - now > MAX_AHEAD:
        raise PeopleError("a maintenance window begins within a year")
    until = begin + _span(for_s, MAX_MAINTENANCE, "a maintenance window")
    if until <= now:
        raise PeopleError(f"the window would be over: it ends {_iso(until)}")
    with store.transaction() as write, store.reader(LIVE) as read:
        _known_nodes(read, names, now)
        number = _next(write, "maintenance_id")
        write.execute(
            "INSERT INTO live.maintenance (id, nodes, reason, actor, claimed, set_at, from_at, until) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [number, names, reason, who.name, who.claimed, now, max(begin, now), until],
        )
        args = {"reason": reason, "from": _iso(begin), "until": _iso(until), "maintenance": number}
        audit(write, now, who, "maintenance start", hostlist.fold(names), args)
    return number


def end_maintenance(store: Store, numbers: Sequence[int], who: Who, now: datetime) -> None:
    """End windows before their time, or call off coming ones: all or none.

    Raises:
        NoSuch: One does not exist.
        NotNow: One is over.
    """
    with store.transaction() as write:
        _end(write, "maintenance", "maintenance window", numbers, who, now)
        audit(write, now, who, "maintenance end", ",".join(map(str, numbers)), {})


def _end(
    write: duckdb.DuckDBPyConnection,
    table: str,
    word: str,
    numbers: Sequence[int],
    who: Who,
    now: datetime,
) -> None:
    if not 0 < len(numbers) <= MAX_NAMES:
        raise PeopleError(f"no {word} given")
    rows = write.execute(
        f"SELECT id, least(until, coalesce(ended_at, until)) FROM live.{table} "
        "WHERE id IN (SELECT unnest(?::BIGINT[]))",
        [list(numbers)],
    ).fetchall()
    over = dict(rows)
    for number in numbers:
        if number not in over:
            raise NoSuch(f"no {word} {number}")
        if over[number] <= now:
            raise NotNow(f"{word} {number} is over since {_iso(over[number])}")
    write.execute(
        f"UPDATE live.{table} SET ended_at = ?, ended_by = ? WHERE id IN (SELECT unnest(?::BIGINT[]))",
        [now, who.name, list(numbers)],
    )


# ---- checks and the audit ----


def one_line(text: str) -> str:
    """Text of a person as it is stored: one line, no control characters, not too long."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_TEXT]


def _reason(text: str, what: str) -> str:
    reason = one_line(text)
    if not reason:
        raise PeopleError(f"{what} needs a reason")
    return reason


def _span(for_s: float, most: timedelta, what: str) -> timedelta:
    if not math.isfinite(for_s) or not 1 <= for_s <= most.total_seconds():
        raise PeopleError(f"{what} lasts from a second to {most.days} days")
    return timedelta(seconds=for_s)


def _known_nodes(read: duckdb.DuckDBPyConnection, nodes: Sequence[str], now: datetime) -> None:
    known = {row[0] for row in read.execute("SELECT node FROM node_list(?)", [now]).fetchall()}
    strange = [node for node in nodes if node not in known]
    if strange:
        raise NoSuch(f"no such node: {hostlist.shorten(strange)}\nsee fleet node")


def _known_serials(read: duckdb.DuckDBPyConnection, serials: Sequence[str]) -> None:
    if not serials:
        return
    rows = read.execute(
        "SELECT lower(trim(serial)) FROM inventory WHERE serial IS NOT NULL UNION "
        "SELECT lower(trim(serial)) FROM expected WHERE serial IS NOT NULL"
    ).fetchall()
    known = {row[0] for row in rows}
    for serial in serials:
        if serial.lower() not in known:
            raise NoSuch(f"no card has the serial {serial!r}\nsee fleet inventory")


def _next(write: duckdb.DuckDBPyConnection, sequence: str) -> int:
    row = write.execute(f"SELECT nextval('live.{sequence}')").fetchone()
    assert row is not None
    return int(row[0])


def audit(
    write: duckdb.DuckDBPyConnection,
    now: datetime,
    who: Who,
    verb: str,
    target: str,
    args: Mapping[str, object],
) -> None:
    """Write down what somebody did; inside `Store.transaction()`."""
    whole = {**args, "claimed": who.claimed} | ({"author": who.said} if who.said else {})
    write.execute(
        "INSERT INTO live.audit (logged_at, actor, source, verb, target, args, result) "
        "VALUES (?, ?, ?, ?, ?, ?, 'ok')",
        [now, who.name, who.source, verb, target[:4000], json.dumps(whole)],
    )


def _iso(at: datetime | None) -> str | None:
    return f"{at.isoformat(timespec='seconds')}Z" if at else None


# ---- what people know of, for documents ----

UNKNOWN: dict[str, object] = {"flags": [], "acknowledged": None}
"""Of an incident that nobody knows of."""


def known(read: duckdb.DuckDBPyConnection, now: datetime) -> dict[int, dict[str, object]]:
    """Flags and acknowledgement of the open incidents that people know of: the others are news."""
    rows = read.execute(
        "SELECT k.number, k.acknowledged, k.silenced, k.maintenance, a.actor, a.claimed, a.acted_at, "
        "a.until, a.text FROM known_at($now) k LEFT JOIN acks_at($now) a ON a.number = k.number",
        {"now": now},
    ).fetchall()
    return {
        number: {
            "flags": [flag for flag, on in zip(FLAGS, marks, strict=True) if on],
            "acknowledged": {
                "by": actor,
                "claimed": claimed,
                "at": _exact(at),
                "until": _exact(until),
                "note": text,
            }
            if marks[0]
            else None,
        }
        for number, *marks, actor, claimed, at, until, text in rows
    }


FLAGS = ("acknowledged", "silenced", "maintenance")


def acts(
    read: duckdb.DuckDBPyConnection, numbers: Sequence[int], since: datetime | None = None
) -> dict[int, list[dict[str, object]]]:
    """What people did with incidents, in order, as entries of their logs."""
    rows = read.execute(
        "SELECT number, acted_at, what, text, actor, claimed FROM incident_act "
        "WHERE number IN (SELECT unnest(?::BIGINT[])) AND acted_at >= coalesce(?, acted_at) ORDER BY id",
        [list(numbers), since],
    ).fetchall()
    found: dict[int, list[dict[str, object]]] = {}
    for number, at, what, text, actor, claimed in rows:
        entry = {
            "logged_at": _exact(at),
            "what": what,
            "finding": None,
            "text": text,
            "by": actor,
            "claimed": claimed,
        }
        found.setdefault(number, []).append(entry)
    return found


def _exact(at: datetime | None) -> str | None:
    return f"{at.isoformat()}Z" if at else None
