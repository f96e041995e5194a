"""What should be there: table `expected`, learned from a node's first whole picture or accepted by a person.

Sets are only ever added; the newest accepted one counts, else the learned one (macro `expected_at`). A set of
no cards is one row without uuid and serial.
"""

import csv
import io
import json
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import duckdb

from gpufleet import hostlist
from gpufleet_collector import baselines
from gpufleet_collector.baselines import Baseline
from gpufleet_collector.store import LIVE, Store

log = logging.getLogger(__name__)

MOST_LINES = 200_000
"""A delivery list is not longer than this."""


class InventoryError(Exception):
    """The request cannot be done; one line that says which node or line and why. Nothing was changed."""


class NotAllowed(Exception):
    """Who asks may not do this; one line. Nothing was changed."""


class NoSuchNode(InventoryError):
    """Nodes that nobody has heard of."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One card that should be there; all of uuid and serial empty = the node has no cards."""

    node: str
    uuid: str | None
    serial: str | None
    pci: str | None
    model: str | None
    slot: str | None


@dataclass(frozen=True, slots=True)
class Pinned:
    """How much was pinned."""

    nodes: int
    gpus: int
    baselines: int


@dataclass(frozen=True, slots=True)
class Difference:
    """One card that is not as expected.

    Attributes:
        kind: missing, extra, moved (another address) or replaced (another card at its address).
        seen_node: Another node that has the card now.
    """

    node: str
    kind: str
    uuid: str | None
    serial: str | None
    model: str | None
    expected_pci: str | None
    seen_pci: str | None
    replaced_by: str | None
    seen_node: str | None


def learn(store: Store, as_of: datetime) -> list[str]:
    """Pin the first whole picture of each node that has no expectation yet; returns their names.

    Whole means: the newest driver sweep ended well, every card answers, and inventory, driver and bus agree.
    """
    if not {"gpu", "pci", "agent"} <= store.tables.keys():
        return []
    with store.reader(LIVE) as read:
        if not read.execute(
            "SELECT 1 FROM node WHERE node NOT IN (SELECT node FROM expected) LIMIT 1"
        ).fetchone():
            return []
        nodes = [row[0] for row in read.execute(_WHOLE, {"as_of": as_of}).fetchall()]
    if not nodes:
        return []
    with store.transaction() as write, store.reader(LIVE) as read:
        _pin(write, _seen(read, nodes, as_of), "learned", "collector", as_of, "first whole inventory")
    for node in nodes:
        log.info("inventory of %s learned", node)
    return nodes


def refuse_agents(
    store: Store,
    names: Collection[str],
    claimed: str,
    verb: str,
    at: datetime | None = None,
    source: str = "",
    deed: str = "change the inventory",
) -> None:
    """Agents' keys lie on every host: whoever takes one host must not say what the fleet should hold.

    Args:
        store: Where.
        names: What the caller's certificate proves.
        claimed: Who the request says it is from; for the audit.
        verb: What is refused; for the audit.
        at: Collector's clock; None = now.
        source: Where the request came from; for the audit.
        deed: What an agent may not do, in words.

    Raises:
        NotAllowed: The certificate names a node, by its name now or an earlier one; the audit says so.
    """
    with store.reader(LIVE) as read:
        agent = read.execute(
            "SELECT min(name) FROM (SELECT unnest([node, claimed]) AS name FROM node "
            "UNION ALL SELECT before FROM node_alias) WHERE name IN (SELECT unnest(?::VARCHAR[]))",
            [sorted(names)],
        ).fetchone()
    if agent is None or agent[0] is None:
        return
    text = f"the certificate belongs to the agent on {agent[0]}: an agent may not {deed}"
    log.warning("%s from %s refused: %s", verb, source, text)
    with store.transaction() as write:
        write.execute(
            "INSERT INTO live.audit (logged_at, actor, source, verb, target, args, result) "
            "VALUES (?, ?, ?, ?, '', ?, ?)",
            [
                at or _now(), ", ".join(sorted(names))[:500], source, verb,
                json.dumps({"author": claimed[:500]}), f"denied: {text}",
            ],
        )  # fmt: skip
    raise NotAllowed(text)


def accept(
    store: Store,
    nodes: Sequence[str],
    author: str,
    reason: str,
    at: datetime | None = None,
    source: str = "",
    claimed: str = "",
) -> Pinned:
    """Pin what these nodes have now, and what their benches and busy clocks are now, as accepted.

    Args:
        store: Where.
        nodes: Which.
        author: Who; for the audit.
        reason: Why; for the audit.
        at: Collector's clock; None = now.
        source: Where the request came from; for the audit.
        claimed: Who the request says it is from, where a certificate says who `author` is; for the audit.

    Raises:
        InventoryError: A node is unknown; nothing was changed.
    """
    now = at or _now()
    with store.transaction() as write, store.reader(LIVE) as read:
        known = {row[0] for row in read.execute("SELECT node FROM node").fetchall()}
        strange = [node for node in nodes if node not in known]
        if strange or not nodes:
            if not strange:
                raise InventoryError("no node given")
            raise NoSuchNode(f"no such node: {hostlist.shorten(strange)}")
        seen = _seen(read, nodes, now)
        values = baselines.seen_now(read, nodes, author, reason, now)
        _pin(write, seen, "accepted", author, now, reason)
        baselines.put(write, values)
        pinned = Pinned(len(set(nodes)), sum(1 for card in seen if card.uuid or card.serial), len(values))
        _audit(write, now, author, source, "inventory accept", ",".join(nodes), reason, pinned, claimed)
    return pinned


def import_csv(
    store: Store,
    cards: bytes,
    baseline: bytes,
    author: str,
    reason: str,
    at: datetime | None = None,
    source: str = "",
    claimed: str = "",
) -> Pinned:
    """Pin a delivery list as accepted: every node it names gets exactly the cards it lists.

    Args:
        store: Where.
        cards: CSV with a header: node,uuid,serial,pci,model (uuid or serial needed).
        baseline: CSV with a header: node,entity,key,value,spread,n; empty = none.
        author: Who; for the audit.
        reason: Why; for the audit.
        at: Collector's clock; None = now.
        source: Where the request came from; for the audit.
        claimed: Who the request says it is from, where a certificate says who `author` is; for the audit.

    Raises:
        InventoryError: A line is wrong; the text names it. Nothing was changed.
    """
    now = at or _now()
    wanted = read_cards(cards)
    values = read_baselines(baseline, author, reason, now) if baseline.strip() else []
    nodes = {card.node for card in wanted}
    pinned = Pinned(len(nodes), len(wanted), len(values))
    with store.transaction() as write:
        strangers = _strangers(write, wanted, now)
        _pin(write, wanted, "accepted", author, now, reason)
        baselines.put(write, values)
        target = f"{len(nodes)} nodes"
        _audit(
            write, now, author, source, "inventory import", target, reason, pinned, claimed, strangers
        )  # fmt: skip
    for node in strangers[:20]:
        log.warning("inventory of %s imported, but it has none of the listed cards: is the list right?", node)
    return pinned


def diff(store: Store, node: str = "", at: datetime | None = None) -> list[Difference]:
    """Only what differs from the expected inventory; `node` empty = every node."""
    with store.reader(LIVE) as read:
        rows = read.execute(_DIFF, {"as_of": at or _now(), "node": node}).fetchall()
    return [Difference(*row) for row in rows]


def read_cards(text: bytes) -> list[Expected]:
    """Read a delivery list.

    Raises:
        InventoryError: With the number of the first wrong line.
    """
    cards: list[Expected] = []
    seen: dict[tuple[str, ...], int] = {}
    for line, row in _lines(
        text, {"node", "uuid", "serial", "pci", "model", "slot", "uuid|serial"}, ("node",)
    ):
        either = row.get("uuid|serial", "")
        uuid = _uuid(row.get("uuid", "") or (either if either.upper().startswith(("GPU-", "MIG-")) else ""))
        serial = row.get("serial", "") or (either if not uuid or _uuid(either) != uuid else "")
        if serial.upper() in ("N/A", "NA", "0", "[N/A]", "NOT SUPPORTED"):
            serial = ""
        if not uuid and not serial:
            raise InventoryError(f"line {line}: needs a uuid or a serial")
        if uuid and not re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}", uuid):
            raise InventoryError(f"line {line}: {uuid!r} is not a UUID like GPU-1b2c...")
        node = row["node"]
        if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z._~-]{0,252}", node):
            raise InventoryError(f"line {line}: {node!r} is not a node name")
        pci = _address(line, row.get("pci", ""))
        # a serial belongs to a board, which may carry two cards: only the same place twice is an error
        key = ("uuid", uuid) if uuid else ("serial", serial, node, pci)
        if key in seen:
            raise InventoryError(f"line {line}: {uuid or serial} stands already in line {seen[key]}")
        seen[key] = line
        cards.append(
            Expected(
                node,
                uuid or None,
                serial or None,
                pci or None,
                row.get("model") or None,
                row.get("slot") or None,
            )
        )
    if not cards:
        raise InventoryError("line 2: no cards listed")
    return cards


def read_baselines(text: bytes, author: str, reason: str, at: datetime) -> list[Baseline]:
    """Read baselines that came with a delivery.

    Raises:
        InventoryError: With the number of the first wrong line.
    """
    out: list[Baseline] = []
    seen: dict[tuple[str, str, str], int] = {}
    allowed = {"node", "entity", "key", "value", "spread", "n"}
    for line, row in _lines(text, allowed, ("node", "entity", "key", "value"), "baseline line"):
        kind, _, card = row["entity"].partition(":")
        key = (row["node"], f"{kind}:{_uuid(card)}" if kind == "gpu" else row["entity"], row["key"])
        if not all(key):
            raise InventoryError(f"baseline line {line}: node, entity and key must not be empty")
        if key in seen:
            raise InventoryError(f"baseline line {line}: {'/'.join(key)} stands already in line {seen[key]}")
        seen[key] = line
        try:
            value, spread, n = float(row["value"]), float(row.get("spread") or 0), int(row.get("n") or 1)
        except ValueError as error:
            raise InventoryError(f"baseline line {line}: {error}") from error
        if not (
            math.isfinite(value) and value > 0 and math.isfinite(spread) and spread >= 0 and 0 < n < 2**31
        ):
            raise InventoryError(
                f"baseline line {line}: value must be above 0, spread not below 0, n at least 1"
            )
        out.append(Baseline(*key, value, spread, n, "", "accepted", author, at, reason))
    return out


def _lines(
    text: bytes, allowed: set[str], needed: Sequence[str], where: str = "line"
) -> list[tuple[int, Mapping[str, str]]]:
    """(line number, cells by column) of a CSV with a header; cells are stripped."""
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InventoryError(f"{where} {text[: error.start].count(10) + 1}: not UTF-8") from error
    if "\0" in decoded:
        raise InventoryError(
            f"{where} {decoded[: decoded.index(chr(0))].count(chr(10)) + 1}: holds a NUL byte"
        )
    reader = csv.reader(io.StringIO(decoded, newline=""), strict=True)
    out: list[tuple[int, Mapping[str, str]]] = []
    header: list[str] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip().lower() for cell in cells]
                strange = [name for name in header if name not in allowed]
                absent = [name for name in needed if name not in header]
                if strange or absent or len(set(header)) != len(header):
                    wrong = (
                        f"unknown column {strange[0]!r}" if strange else f"no column {absent[:1] or 'twice'}"
                    )
                    raise InventoryError(
                        f"{where} {reader.line_num}: header: {wrong}; may hold {_names(allowed)}"
                    )
                continue
            if len(cells) != len(header):
                raise InventoryError(
                    f"{where} {reader.line_num}: {len(cells)} cells, but the header has {len(header)}"
                )
            if max(map(len, cells)) > 1000 or len(out) >= MOST_LINES:
                raise InventoryError(f"{where} {reader.line_num}: too long")
            out.append((reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=True))))
    except csv.Error as error:
        raise InventoryError(f"{where} {reader.line_num}: {error}") from error
    if header is None:
        raise InventoryError(f"{where} 1: empty, needs a header")
    return out


def _names(columns: set[str]) -> str:
    return ",".join(sorted(name for name in columns if "|" not in name))


def _uuid(text: str) -> str:
    """A card's UUID as drivers write it: the prefix in capitals, the digits not, whatever a list has."""
    head, dash, rest = text.partition("-")
    return f"{head.upper()}-{rest.lower()}" if dash and head.upper() in ("GPU", "MIG") else text


def _address(line: int, text: str) -> str:
    """`dddd:bb:dd.f` of what people and tools write (00000000:1B:00.0, 1b:00.0)."""
    if not text:
        return ""
    found = re.fullmatch(
        r"(?:([0-9a-fA-F]{4}|0000[0-9a-fA-F]{4}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?", text
    )
    if not found:
        raise InventoryError(f"line {line}: {text!r} is not a PCI address like 0000:1b:00.0")
    return f"{(found[1] or '0000')[-4:]}:{found[2]}:{found[3]}.{found[4] or '0'}".lower()


def _seen(read: duckdb.DuckDBPyConnection, nodes: Sequence[str], at: datetime) -> list[Expected]:
    rows = read.execute(
        "SELECT node, gpu_uuid, serial, pci, model, slot FROM inventory_at($at) "
        "WHERE node IN (SELECT unnest($nodes::VARCHAR[])) ORDER BY node, gpu_index, pci",
        {"at": at, "nodes": list(nodes)},
    ).fetchall()
    cards = [Expected(*row) for row in rows]
    bare = sorted(set(nodes) - {card.node for card in cards})
    return cards + [Expected(node, None, None, None, None, None) for node in bare]


def _strangers(read: duckdb.DuckDBPyConnection, wanted: Sequence[Expected], at: datetime) -> list[str]:
    """Nodes that were heard lately and have none of the cards that are listed for them."""
    names = sorted({card.node for card in wanted})
    rows = read.execute(
        "SELECT n.node, lower(i.uuid), lower(trim(i.serial)) FROM "
        "(SELECT DISTINCT node FROM live.ledger WHERE received_at > ?::TIMESTAMP - INTERVAL 10 MINUTE "
        "AND node IN (SELECT unnest(?::VARCHAR[]))) n "
        "LEFT JOIN live.inventory i ON i.node = n.node AND i.kind = 'gpu' AND i.valid_to IS NULL",
        [at, names],
    ).fetchall()
    there = {(node, name) for node, *both in rows for name in both if name}
    found = {
        card.node
        for card in wanted
        for name in (card.uuid, card.serial)
        if name and (card.node, name.lower()) in there
    }
    return sorted({row[0] for row in rows} - found)


def _pin(
    write: duckdb.DuckDBPyConnection,
    cards: Sequence[Expected],
    state: str,
    author: str,
    at: datetime,
    reason: str,
) -> None:
    names = ("node", "uuid", "serial", "pci", "model", "slot")
    cells = ", ".join(f"unnest(?::VARCHAR[]) AS {name}" for name in names)
    write.execute(
        f"INSERT INTO live.expected BY NAME SELECT {cells}, "
        "? AS state, ? AS set_by, ?::TIMESTAMP AS set_at, ? AS reason",
        [*([getattr(card, name) for card in cards] for name in names), state, author, at, reason],
    )


def _audit(
    write: duckdb.DuckDBPyConnection,
    at: datetime,
    author: str,
    source: str,
    verb: str,
    target: str,
    reason: str,
    pinned: Pinned,
    claimed: str,
    strangers: Sequence[str] = (),
) -> None:
    args: dict[str, object] = {
        "reason": reason, "nodes": pinned.nodes, "gpus": pinned.gpus, "baselines": pinned.baselines
    }  # fmt: skip
    if claimed:
        args["author"] = claimed
    if strangers:
        args["none_of_the_listed_cards_seen_on"] = list(strangers[:100])
    write.execute(
        "INSERT INTO live.audit (logged_at, actor, source, verb, target, args, result) "
        "VALUES (?, ?, ?, ?, ?, ?, 'ok')",
        [at, author, source, verb, target[:4000], json.dumps(args)],
    )


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


_WHOLE = """
with fresh as (
    select node from node_list($as_of)
    where expectation = 'none' and hello_at is not null
),
sweep as (
    select node, max(ts) as ts, max_by(ok, ts) as ok, max_by(rows, ts) as rows
    from agent
    where probe = 'gpu' and ts > $as_of - interval 60 second and ts <= $as_of and node in (from fresh)
    group by node
),
answering as (
    -- a row may be there twice
    select g.node, count(*) as rows, count(distinct hash(g.gpu_uuid, g.pci)) as listed,
           count(distinct i.gpu_uuid) filter (g.state = 'ok') as cards
    from gpu g join sweep s on s.node = g.node and s.ts = g.ts
    left join inventory_at($as_of) i on i.node = g.node and i.gpu_uuid = g.gpu_uuid
    where g.ts > $as_of - interval 60 second
    group by g.node
),
pci_sweep as (
    select node, max(ts) as ts from agent
    where probe = 'pci' and ok and ts > $as_of - interval 5 minute and ts <= $as_of and node in (from fresh)
    group by node
),
bus as (
    select p.node, count(distinct p.pci) as cards
    from pci p join pci_sweep s on s.node = p.node and s.ts = p.ts
    where p.ts > $as_of - interval 5 minute and p.device_kind = 'gpu'
      and coalesce(p.vendor_id, '10de') = '10de' and coalesce(p.bound_driver, '') <> 'vfio-pci'
    group by p.node
),
listed as (select node, count(*) as cards from inventory_at($as_of) group by node),
host as (
    select node,
           max_by(coalesce(json_extract_string(attributes, '$.complete'), 'true'), valid_from) as complete
    from inventory
    where entity = 'node:' and valid_from <= $as_of and (valid_to is null or valid_to > $as_of)
    group by node
)
select f.node
from fresh f
join sweep s using (node)
join host h using (node)
left join answering a using (node)
left join listed l using (node)
left join bus b using (node)
where s.ok and h.complete <> 'false'
  and coalesce(a.rows, 0) = s.rows and coalesce(a.cards, 0) = coalesce(a.listed, 0)
  and coalesce(l.cards, 0) = coalesce(a.cards, 0) and (b.cards is null or b.cards = coalesce(a.cards, 0))
order by f.node
"""

_DIFF = """
with card as (
    select c.*, i.pci as seen_pci
    from card_list($as_of) c
    left join inventory_at($as_of) i on i.node = c.node and i.gpu_uuid = c.gpu_uuid
    where ($node = '' or c.node = $node)
      and c.node in (select node from node_list($as_of) where expectation <> 'none')
)
select c.node,
       case when c.expectation = 'none' then 'extra'
            when c.installed then 'moved'
            when h.gpu_uuid is not null then 'replaced'
            else 'missing' end as kind,
       c.gpu_uuid, c.serial, c.model, c.expected_pci, c.seen_pci,
       if(not c.installed, h.gpu_uuid, null) as replaced_by,
       e.node as seen_node
from card c
left join inventory_at($as_of) h on h.node = c.node and h.pci = coalesce(c.expected_pci, c.pci)
      and h.gpu_uuid <> coalesce(c.gpu_uuid, '')
left join (select gpu_uuid, min(node) as node from inventory_at($as_of) group by gpu_uuid) e
       on e.gpu_uuid = c.gpu_uuid and e.node <> c.node and not c.installed
where c.expectation = 'none' or not c.installed or c.expected_pci <> c.seen_pci
order by c.node, coalesce(c.expected_pci, c.pci)
"""
