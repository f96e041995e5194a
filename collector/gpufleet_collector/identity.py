"""Who an agent is: machine id first, then boot and spool, then the name it gives itself.

Two machines with one name, or two running boots with one machine id, are two nodes: the second gets a suffix
and both keep their rows. A machine that comes back under another name takes what is known about it along.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import duckdb
import numpy as np

from gpufleet_collector.frame import Frame

NODE = re.compile(r"[A-Za-z0-9._~-]{1,253}")
ID = re.compile(r"[A-Za-z0-9_.:-]{0,64}")
"""Machine, boot and spool ids."""

SILENT_US = 90_000_000
"""A node not heard of for this long is not live."""

_SLACK_US = 1_000_000

RELABELLED = (
    "inventory", "expected", "baseline", "finding", "incident", "limits", "capability", "probe",
)  # fmt: skip
"""Tables whose rows follow a machine to its new name; samples and events keep theirs (see node_alias)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a hello says.

    Attributes:
        name: The name it gives itself.
        machine_id: Empty when it has none that could tell it from others.
        boot_id: Of the running boot.
        spool_id: Of its spool file.
        agent_version: As sent.
        booted_us: When its boot began, on the collector's clock; None = it does not say.
        names: Of its certificate; None = the connection has none.
    """

    name: str
    machine_id: str
    boot_id: str
    spool_id: str
    agent_version: str
    booted_us: int | None
    names: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A row of `live.node`."""

    node: str
    claimed: str
    machine_id: str
    boot_id: str
    spool_id: str
    agent_version: str
    conflict: str
    first_seen_us: int
    hello_us: int


@dataclass(frozen=True, slots=True)
class Alive:
    """What is known about a node's presence.

    Attributes:
        open: It has a stream.
        boot_id: That stream's boot.
        received_us: When it was last heard of, on the collector's clock.
    """

    open: bool
    boot_id: str
    received_us: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Under which name an agent is filed.

    Attributes:
        machine: Its row from now on.
        before: The name it was filed under until now; empty = the same, or it is new.
        new: Whether it has no row yet.
        conflict: Whether this hello began a conflict.
        displaced: Whether a row of the same name, of a machine that is gone, makes room.
    """

    machine: Machine
    before: str
    new: bool
    conflict: bool
    displaced: bool


def machine_id(text: str) -> str:
    """The machine id, or "" when it tells no machine from another (absent, all zero, uninitialized)."""
    text = text.strip().lower()
    return "" if not text.strip("0-") or text == "uninitialized" else text


class Identities:
    """All machines ever filed."""

    def __init__(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._alike: dict[tuple[str, str], set[str]] = {}
        self._fresh: dict[str, Machine] = {}

    def load(self, read: duckdb.DuckDBPyConnection) -> None:
        """Start from the table."""
        rows = read.execute(
            "SELECT node, claimed, machine_id, boot_id, spool_id, agent_version, conflict, "
            "epoch_us(first_seen), epoch_us(hello_at) FROM live.node"
        ).fetchall()
        self._machines, self._alike, self._fresh = {}, {}, {}
        for row in rows:
            self._put(Machine(*row))

    def refused(self, claim: Claim, alive: Callable[[str], Alive | None]) -> str:
        """Why this agent must not be filed: it would become a machine that its certificate does not name.

        A machine id is no secret. An agent whose own name is filed already, or whose machine id is used by
        another boot that runs now, takes nothing from anybody: those are filed as nodes of their own.
        """
        same = self._same(claim)
        if not all(_is_foreign(machine, claim) for machine in same):
            return ""
        for machine in same:
            if not _is_clone(alive(machine.node), claim):
                return (
                    f"machine id {claim.machine_id} is filed as {machine.node}, which is not in the "
                    f"certificate of {claim.name}: a renamed host needs one with both names"
                )
        return ""

    def _same(self, claim: Claim) -> list[Machine]:
        nodes = self._alike.get(("id", claim.machine_id), set()) if claim.machine_id else set()
        nodes = nodes | self._alike.get(("name", claim.name), set())
        return [self._machines[node] for node in sorted(nodes) if _is_same(self._machines[node], claim)]

    def decide(self, claim: Claim, alive: Callable[[str], Alive | None], now_us: int) -> Decision:
        """Where to file this agent, unless it is `refused`. Changes nothing; see `store`."""
        same = self._same(claim)
        mine = [machine for machine in same if not _is_foreign(machine, claim)]
        own = self._own(mine, claim, alive, now_us)
        name, conflict, displaced = self._name(claim, own, same, alive, now_us)
        machine = Machine(
            name, claim.name, claim.machine_id, claim.boot_id, claim.spool_id, claim.agent_version, conflict,
            own.first_seen_us if own else now_us, now_us,
        )  # fmt: skip
        before = own.node if own is not None and own.node != name else ""
        began = bool(conflict) and (own is None or not own.conflict)
        return Decision(machine, before, own is None, began, displaced)

    def _own(
        self, same: list[Machine], claim: Claim, alive: Callable[[str], Alive | None], now_us: int
    ) -> Machine | None:
        """The row of this very machine, if it has one."""
        for machine in same:
            alone = len(same) == 1 and claim.boot_id
            if machine.boot_id == claim.boot_id and (machine.spool_id == claim.spool_id or alone):
                return machine
        for machine in same:
            if machine.boot_id == claim.boot_id and claim.boot_id:
                return machine
        free = [machine for machine in same if not _runs_beside(machine, alive(machine.node), claim)]
        for machine in free:
            if machine.spool_id == claim.spool_id and claim.spool_id:
                return machine
        for machine in free:
            if machine.claimed == claim.name:
                return machine
        for machine in free:
            if not _is_live(alive(machine.node), now_us):
                return machine
        return None

    def _name(
        self,
        claim: Claim,
        own: Machine | None,
        same: list[Machine],
        alive: Callable[[str], Alive | None],
        now_us: int,
    ) -> tuple[str, str, bool]:
        """(name, node it is in conflict with, whether a dead row of that name makes room)."""
        twins = [machine for machine in same if machine is not own]
        holder = self._machines.get(claim.name)
        foreign = twins[0].node if own is None and twins else ""
        if own is None and not all(_is_foreign(machine, claim) for machine in twins):
            return self._suffixed(claim.name, claim.boot_id or claim.spool_id), twins[0].node, False
        if (
            own is not None
            and own.conflict
            and own.claimed == claim.name
            and (twins or holder not in (None, own))
        ):
            return own.node, own.conflict, False
        if holder is None or holder is own:
            return claim.name, foreign, False
        if own is None and not _is_live(alive(holder.node), now_us):
            return claim.name, foreign, True
        source = claim.machine_id or claim.boot_id or claim.spool_id
        return self._suffixed(claim.name, source), holder.node, False

    def _suffixed(self, name: str, source: str) -> str:
        source = re.sub(r"[^A-Za-z0-9]", "", source)
        for length in range(4, max(5, len(source) + 1)):
            candidate = f"{name}~{source[:length]}"
            if source and candidate not in self._machines:
                return candidate
        number = 2
        while f"{name}~{number}" in self._machines:
            number += 1
        return f"{name}~{number}"

    def store(self, write: duckdb.DuckDBPyConnection, decision: Decision) -> None:
        """Write the decision; inside `Store.transaction()`. New rows wait for `flush`."""
        machine = decision.machine
        if decision.displaced:
            write.execute("DELETE FROM live.node WHERE node = ?", [machine.node])
            self._fresh.pop(machine.node, None)
        was = decision.before or machine.node
        if decision.new or self._fresh.pop(was, None) is not None:
            self._fresh[machine.node] = machine
        else:
            write.execute(
                "UPDATE live.node SET node = ?, claimed = ?, machine_id = ?, boot_id = ?, spool_id = ?, "
                "agent_version = ?, conflict = ?, first_seen = make_timestamp(?), "
                "hello_at = make_timestamp(?) WHERE node = ?",
                [*_values(machine), was],
            )
        if decision.before:
            self._relabel(write, decision)
        self._drop(was)
        self._drop(machine.node)
        self._put(machine)

    def _put(self, machine: Machine) -> None:
        self._machines[machine.node] = machine
        self._alike.setdefault(_key(machine), set()).add(machine.node)

    def _drop(self, node: str) -> None:
        machine = self._machines.pop(node, None)
        if machine is not None:
            self._alike[_key(machine)].discard(node)

    def flush(self, write: duckdb.DuckDBPyConnection) -> None:
        """Append the rows of new machines, all at once."""
        rows = list(self._fresh.values())
        self._fresh = {}
        if not rows:
            return
        frame = Frame()
        for name in ("node", "claimed", "machine_id", "boot_id", "spool_id", "agent_version", "conflict"):
            frame.texts(name, [getattr(row, name) for row in rows])
        frame.times("first_seen", np.array([row.first_seen_us for row in rows], np.int64))
        frame.times("hello_at", np.array([row.hello_us for row in rows], np.int64))
        frame.insert(write, "live.node")

    @staticmethod
    def _relabel(write: duckdb.DuckDBPyConnection, decision: Decision) -> None:
        before, machine = decision.before, decision.machine
        for table in RELABELLED:
            write.execute(f"UPDATE live.{table} SET node = ? WHERE node = ?", [machine.node, before])
        for table in ("silence", "maintenance"):
            write.execute(
                f"UPDATE live.{table} SET nodes = list_transform(nodes, lambda n: if(n = $before, $node, n)) "
                "WHERE list_contains(nodes, $before)",
                {"before": before, "node": machine.node},
            )
        write.execute("UPDATE live.ledger SET node = ? WHERE node = ? AND spool_id = ?",
                      [machine.node, before, machine.spool_id])  # fmt: skip
        write.execute(
            "INSERT INTO live.node_alias VALUES (?, ?, make_timestamp(?))",
            [before, machine.node, machine.hello_us],
        )
        write.execute("UPDATE live.node SET conflict = ? WHERE conflict = ?", [machine.node, before])

    def follow(self, before: str, node: str) -> None:
        """Conflicts that named a machine name it by its new name."""
        for machines in (self._machines, self._fresh):
            for key, machine in list(machines.items()):
                if machine.conflict == before:
                    machines[key] = replace(machine, conflict=node)


def _key(machine: Machine) -> tuple[str, str]:
    return ("id", machine.machine_id) if machine.machine_id else ("name", machine.claimed)


def _values(machine: Machine) -> list[str | int]:
    return [
        machine.node, machine.claimed, machine.machine_id, machine.boot_id, machine.spool_id,
        machine.agent_version, machine.conflict, machine.first_seen_us, machine.hello_us,
    ]  # fmt: skip


def _is_same(machine: Machine, claim: Claim) -> bool:
    """Whether a row may be of the machine that calls."""
    if claim.machine_id and machine.machine_id == claim.machine_id:
        return True
    if machine.claimed != claim.name or machine.machine_id:
        return False
    return not claim.machine_id or machine.boot_id == claim.boot_id


def _is_live(alive: Alive | None, now_us: int) -> bool:
    return alive is not None and (alive.open or now_us - alive.received_us < SILENT_US)


def _is_foreign(machine: Machine, claim: Claim) -> bool:
    """Whether a row belongs to a node that the caller's certificate does not name."""
    return claim.names is not None and machine.claimed not in claim.names


def _is_clone(alive: Alive | None, claim: Claim) -> bool:
    """Whether a row's machine runs now and is in another boot than the caller."""
    return alive is not None and alive.open and bool(claim.boot_id) and alive.boot_id != claim.boot_id


def _runs_beside(machine: Machine, alive: Alive | None, claim: Claim) -> bool:
    """Whether another boot is running under this row while the caller's boot runs too.

    A machine that rebooted so fast that its old stream still looks open is told apart by its uptime: its boot
    began after the old one was last heard of. Without machine and boot id a spool is all there is to go by.
    """
    if alive is None or not alive.open:
        return False
    if not claim.boot_id:
        return not claim.machine_id and machine.spool_id != claim.spool_id
    if alive.boot_id == claim.boot_id:
        return False
    return claim.booted_us is None or claim.booted_us + _SLACK_US < alive.received_us
