"""Network ports of a simulated host: its answer to probe `port`.

Hosts with data-centre cards have an InfiniBand port near each card and one for Ethernet; others have Ethernet
alone. Pure: a row is a function of the scenario and the time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers import cards
from gpufleet_agent.drivers.ports import (
    COUNTERS,
    HARDWARE,
    INTERFACE,
    NO_RDMA,
    NOT_ACTIVE,
    NOT_ETHERNET,
)
from gpufleet_agent.drivers.timeline import CardPhase, NodePhase, Timeline, uptime_at_start_s
from gpufleet_agent.scenario import Fault, Scenario

FIRMWARE = "28.43.2026"
_SIGNALLING = {400: "NDR", 200: "HDR"}
_ETHERNET_GBPS = 25.0
_BUSY_SHARE = 0.4
"""Part of its rate that a port carries while its card works."""

_ETHERNET_BYTES_PER_S = 4_000_000
_DOWN = {
    "polling": ("DOWN", "Polling"),
    "disabled": ("DOWN", "Disabled"),
    "init": ("INIT", "LinkUp"),
    "armed": ("ARMED", "LinkUp"),
}
_KINDS = ("port_down", "port_flapping", "port_errors", "port_rate")
_NEAR = ("18", "40", "4f", "5e", "9a", "c0", "ce", "dc")
_ABSENT = Null(Reason.NOT_SUPPORTED, "ENOENT")


@dataclass(frozen=True, slots=True)
class _Slot:
    """An InfiniBand port: what never changes, and what its faults do to it."""

    fixed: Mapping[str, Cell]
    gbps: int
    card: Timeline[CardPhase]
    faults: tuple[Fault, ...]


class SimulatedPorts:
    """The ports of one host.

    Args:
        scenario: What it goes through.
        node: The host's name there.
        boots: Its boots.
        timelines: Its cards, in order of their slots.
    """

    def __init__(
        self,
        scenario: Scenario,
        node: str,
        boots: Timeline[NodePhase],
        timelines: Sequence[Timeline[CardPhase]],
    ) -> None:
        seed, model = scenario.fleet.seed, scenario.model(node)
        self._boots = boots
        self._first = -uptime_at_start_s(scenario, node)
        self._slots: list[_Slot] = []
        if model.infiniband_gbps:
            for slot, timeline in enumerate(timelines):
                faults = [one for one in scenario.faults(node, slot) if one.kind in _KINDS]
                fixed = _infiniband(seed, node, slot, len(timelines))
                self._slots.append(_Slot(fixed, model.infiniband_gbps, timeline, tuple(faults)))
        self._ethernet = _ethernet(len(self._slots), model.guest)

    def rows(self, t: float) -> list[Row]:
        """The columns of probe `port` at `t`."""
        booted_at = self._boots.at(t).booted_at
        rows = [_row(slot, t, booted_at, self._first) for slot in self._slots]
        moved = int(max(0.0, t - booted_at) * _ETHERNET_BYTES_PER_S)
        ethernet: Row = {**self._ethernet, "rx_bytes_total": moved, "tx_bytes_total": moved // 3}
        return [*(row for row in rows if row is not None), ethernet]


def _row(slot: _Slot, t: float, booted_at: float, first: float) -> Row | None:
    state, physical, lanes = "ACTIVE", "LinkUp", 4
    counts: dict[str, Cell] = {}
    downs = 0
    for fault in slot.faults:
        since, until = max(fault.at, booted_at), min(fault.end, t)
        passed, active = max(0.0, until - since), fault.active(t)
        if fault.kind == "port_down":
            downs += since == fault.at and t >= fault.at and fault.param("as") in ("polling", "disabled")
            if active and fault.param("as") == "gone":
                return None
            if active:
                state, physical = _DOWN[str(fault.param("as"))]
        elif fault.kind == "port_flapping":
            period, down = fault.number("period_s"), fault.number("down_s")
            downs += math.floor(passed / period) + (t >= since) if until >= since else 0
            if active and (t - fault.at) % period < down:
                state, physical = "DOWN", "Polling"
        elif fault.kind == "port_errors":
            name = f"{fault.param('counter')}_total"
            before = counts.get(name, 0)
            counts[name] = int(passed * fault.number("per_minute") / 60) + (
                before if isinstance(before, int) else 0
            )
        elif active:
            lanes = min(lanes, int(fault.number("lanes")))
    moved = int(_busy_s(slot.card, t, booted_at, first) * slot.gbps / 8 * 1e9 * _BUSY_SHARE)
    row: dict[str, Cell] = {
        **slot.fixed,
        "state": state,
        "phys_state": physical,
        "link_downed_total": downs,
        "carrier_changes_total": 2 * downs + 1,
        "carrier": state == "ACTIVE",
        "rx_bytes_total": moved,
        "tx_bytes_total": moved,
        "rate_best_gbps": float(slot.gbps),
        **counts,
    }
    if state == "ACTIVE":
        signalling = _SIGNALLING[slot.gbps]
        return row | {"rate_gbps": slot.gbps * lanes / 4, "lanes": lanes, "signalling": signalling}
    return row | dict.fromkeys(("rate_gbps", "lanes", "signalling"), NOT_ACTIVE)


def _busy_s(card: Timeline[CardPhase], t: float, booted_at: float, first: float) -> float:
    """Seconds for which the card has worked since the boot, whole ones of full load."""
    busy = 0.0
    ends = [phase.start for phase in card.phases[1:]] + [math.inf]
    for phase, end in zip(card.phases, ends, strict=True):
        start = first if phase is card.phases[0] else phase.start
        busy += max(0.0, min(end, t) - max(start, booted_at)) * phase.util / 100
    return busy


def _infiniband(seed: int, node: str, slot: int, count: int) -> dict[str, Cell]:
    digits = f"{cards.number(seed, node, slot, 'guid') & 0xFFFFFF:06x}"
    guid = f"b83f:d203:00{digits[:2]}:{digits[2:]}"
    bus = int(_near(slot), 16)
    how = {other: "node" if other // 4 == slot // 4 else "sys" for other in range(count)} | {slot: "pix"}
    near = sorted(how, key=lambda other: (other != slot, how[other], other))
    return {
        "device": f"mlx5_{slot}",
        "port": 1,
        "link_layer": "InfiniBand",
        "guid": guid,
        "pci": f"{slot // 8:04x}:{bus:02x}:00.0",
        "netdev": f"ibp{bus}s0",
        "firmware": FIRMWARE,
        "board": "MT_0000000838",
        "numa_node": slot % 8 // 4,
        "gpu_affinity": ",".join(f"{cards.slot_address(other)}={how[other]}" for other in near),
        "interface_up": True,
        "mtu_bytes": 2044,
        "lid": 100 + cards.number(seed, node, slot, "lid") % 40_000,
        "sm_lid": 1,
        "in_use": True,
        **dict.fromkeys(COUNTERS, 0),
        **dict.fromkeys(HARDWARE, 0),
        **dict.fromkeys(INTERFACE, NOT_ETHERNET),
    }


def _near(slot: int) -> str:
    return _NEAR[slot % len(_NEAR)]


def _ethernet(number: int, guest: bool) -> dict[str, Cell]:
    """Beside InfiniBand ports an RDMA device as well; else a card without RDMA, in a guest a virtual one."""
    rdma = number > 0
    row: dict[str, Cell] = {
        "device": f"mlx5_{number}" if rdma else "eth0",
        "port": 1,
        "link_layer": "Ethernet",
        "guid": "b83f:d203:00f0:0001" if rdma else NO_RDMA,
        "pci": "0000:2a:00.0" if rdma else "0000:00:03.0",
        "netdev": "ens1f0np0" if rdma else "eth0",
        "firmware": FIRMWARE if rdma else _ABSENT,
        "board": "MT_0000000436" if rdma else _ABSENT,
        "numa_node": 0,
        "interface_up": True,
        "carrier": True,
        "carrier_changes_total": 1,
        "mtu_bytes": 9000 if rdma else 1500,
        "state": "ACTIVE",
        "phys_state": "LinkUp" if rdma else NO_RDMA,
        "rate_gbps": Null(Reason.NOT_SUPPORTED, "unknown") if guest else 100.0 if rdma else _ETHERNET_GBPS,
        "lanes": 4 if rdma else NO_RDMA,
        "signalling": "EDR" if rdma else NO_RDMA,
        "lid": 0 if rdma else NO_RDMA,
        "sm_lid": 0 if rdma else NO_RDMA,
        "in_use": True,
        **dict.fromkeys(COUNTERS, 0 if rdma else NO_RDMA),
        **dict.fromkeys(HARDWARE, 0 if rdma else NO_RDMA),
        **dict.fromkeys(INTERFACE, 0),
    }
    return row | {"rate_best_gbps": row["rate_gbps"]}
