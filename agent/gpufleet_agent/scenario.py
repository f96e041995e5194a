"""What a simulated fleet goes through: a TOML file of hosts, loads and faults, read once and checked whole.

`drivers/simulated.py` plays it; `fleet demo` takes the expected inventory, the baselines and the faults that
must be found from here. docs/scenarios.md is the guide for people.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from gpufleet import config
from gpufleet.config import ConfigError
from gpufleet_agent import labels
from gpufleet_agent.drivers import Progress, cards

if TYPE_CHECKING:
    from gpufleet_agent.drivers.simulated import SimulatedHost

Param = float | int | str | bool
Cards = int | list[int] | str
"""One card by its number, several, or "*"."""

_MOST_NODES = 20_000
_MOST_GPUS = 16
_WIDTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Accepts:
    """One parameter of a fault kind.

    Attributes:
        default: Taken when the scenario does not say; None = the card's own.
        low: Smallest number.
        high: Largest number.
        words: The only words (or numbers) it may be; empty = any within low and high.
    """

    default: Param | None
    low: float = -math.inf
    high: float = math.inf
    words: tuple[Param, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault: what it hits, and its parameters.

    Attributes:
        card: It hits cards; otherwise a host.
        params: Name -> what it accepts.
        until: It may have an end.
        port: It hits the network port near the card.
        entity: What of a host it is about; `{name}` stands for a parameter.
    """

    card: bool
    params: Mapping[str, Accepts]
    until: bool = True
    port: bool = False
    entity: str = "node:"


_GONE = ("driver_not_loaded", "no_library", "driver_mismatch", "no_permission", "driver_failed")
_DUTY = Accepts(1.0, 0.05, 1.0)
PORT_DOWN = ("polling", "disabled", "init", "armed", "gone")
PORT_ERRORS = ("symbol_errors", "rcv_errors", "xmit_discards", "local_link_integrity_errors")
_MEMORY = Accepts("dram", words=("dram", "sram"))
_MOUNTS = ("/", "/scratch", "/dev/shm", "/data")

DIMMS = tuple(f"mc{controller}/dimm{module}" for controller in range(2) for module in range(8))
"""The memory modules of a simulated host."""

KINDS: dict[str, Kind] = {
    "card_lost": Kind(
        True,
        {
            "bus": Accepts("all_ones", words=("all_ones", "absent", "ok")),
            "code": Accepts("gpu_is_lost", words=("gpu_is_lost", "unknown_error", "reset_required")),
        },
    ),
    "card_absent": Kind(True, {"where": Accepts("bus", words=("bus", "driver", "excluded"))}),
    "driver_not_loaded": Kind(
        False,
        {
            "code": Accepts(
                "driver_not_loaded",
                words=(
                    "driver_not_loaded",
                    "no_library",
                    "driver_mismatch",
                    "no_permission",
                    "driver_failed",
                ),
            )
        },
    ),
    "hw_thermal": Kind(True, {"ratio": Accepts(0.5, 0.1, 1.0), "duty": _DUTY}),
    "hw_brake": Kind(True, {"ratio": Accepts(0.5, 0.1, 1.0), "duty": _DUTY}),
    "clock_pinned": Kind(True, {"ratio": Accepts(0.6, 0.05, 1.0), "mhz": Accepts(None, 100, 5000)}),
    "sw_power_cap": Kind(True, {"ratio": Accepts(0.97, 0.1, 1.0), "limit_w": Accepts(None, 20, 3000)}),
    "pcie_width": Kind(True, {"width": Accepts(8, words=_WIDTHS)}),
    "pcie_gen": Kind(True, {"gen": Accepts(1, words=(1, 2, 3, 4, 5, 6))}),
    "h2d_drop": Kind(True, {"loss": Accepts(0.2, 0.0, 0.99)}),
    "silent_corruption": Kind(True, {"share": Accepts(1.0, 0.0, 1.0)}),
    "driver_hang": Kind(True, {"call": Accepts("temperature")}),
    "agent_stopped": Kind(False, {}),
    "reboot": Kind(False, {"down_s": Accepts(60.0, 1, 86400)}, until=False),
    "clock_skew": Kind(False, {"offset_s": Accepts(-120.0, -(10**9), 10**9)}),
    "board_swap": Kind(True, {}),
    "ecc_uncorrectable": Kind(True, {"count": Accepts(1, 1, 10**6), "where": _MEMORY}),
    "ecc_corrected": Kind(True, {"per_hour": Accepts(600, 1, 10**9), "where": _MEMORY}),
    "sram_threshold": Kind(True, {}),
    "remap_pending": Kind(True, {}),
    "remap_failed": Kind(True, {}),
    "recovery_action": Kind(
        True,
        {
            "action": Accepts(
                "gpu_reset",
                words=(
                    "gpu_reset",
                    "node_reboot",
                    "drain_p2p",
                    "drain_and_reset",
                    "bus_reset",
                    "system_reboot",
                ),
            )
        },
    ),
    "pcie_replays": Kind(True, {"per_minute": Accepts(60, 1, 10**9)}),
    "aer_errors": Kind(
        True,
        {
            "per_minute": Accepts(60, 0.01, 10**9),
            "severity": Accepts("corrected", words=("corrected", "nonfatal", "fatal")),
            "end": Accepts("card", words=("card", "port")),
        },
    ),
    "mig_on": Kind(True, {}),
    "persistence_off": Kind(True, {}),
    "nvlink_down": Kind(True, {"link": Accepts(0, 0, 35), "count": Accepts(1, 1, 36)}),
    "nvlink_errors": Kind(
        True,
        {
            "per_minute": Accepts(60, 1, 10**9),
            "link": Accepts(0, 0, 35),
            "what": Accepts("crc", words=("crc", "replay", "recovery")),
        },
    ),
    "nvlink_training": Kind(True, {"seconds": Accepts(100.0, 1, 86400)}),
    "fabric_stuck": Kind(True, {"state": Accepts("in_progress", words=("in_progress", "not_started"))}),
    "xid": Kind(True, {"code": Accepts(31, 1, 9999), "text": Accepts("")}, until=False),
    "port_down": Kind(True, {"as": Accepts("polling", words=PORT_DOWN)}, port=True),
    "port_flapping": Kind(
        True, {"period_s": Accepts(60.0, 5, 86400), "down_s": Accepts(15.0, 0, 86400)}, port=True
    ),
    "port_errors": Kind(
        True,
        {"per_minute": Accepts(600, 1, 10**9), "counter": Accepts("symbol_errors", words=PORT_ERRORS)},
        port=True,
    ),
    "port_rate": Kind(True, {"lanes": Accepts(2, words=(1, 2))}, port=True),
    "dimm_errors": Kind(
        False,
        {
            "kind": Accepts("ce", words=("ce", "ue")),
            "per_hour": Accepts(600, 1, 10**9),
            "dimm": Accepts("mc0/dimm3", words=DIMMS),
        },
        entity="dimm:{dimm}",
    ),
    "clock_unsynced": Kind(False, {"offset_s": Accepts(0.0, -1000, 1000)}),
    "process_stuck": Kind(
        False, {"seconds": Accepts(900, 0, 10**7), "killed": Accepts("no", words=("no", "yes"))}
    ),
    "disk_full": Kind(
        False,
        {"mount": Accepts("/scratch", words=_MOUNTS), "used_pct": Accepts(99.9, 50, 100)},
        entity="mount:{mount}",
    ),
    "disk_slow": Kind(
        False,
        {"disk": Accepts("nvme1n1", words=("nvme0n1", "nvme1n1")), "await_ms": Accepts(400, 1, 60_000)},
        entity="disk:{disk}",
    ),
    "mount_hung": Kind(False, {"mount": Accepts("/data", words=_MOUNTS)}, entity="mount:{mount}"),
    "mount_read_only": Kind(False, {"mount": Accepts("/scratch", words=_MOUNTS)}, entity="mount:{mount}"),
    "library_upgraded": Kind(False, {"version": Accepts("570.172.08")}),
    "data_starved": Kind(
        True,
        {
            "share": Accepts(0.3, 0.0, 0.95),
            "cause": Accepts("storage", words=("storage", "nfs_hung", "cpu", "remote", "no_workers")),
            "hook": Accepts("yes", words=("yes", "no")),
        },
    ),
}
"""Every fault kind, by the word a scenario uses."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fleet]`.

    Attributes:
        nodes: How many hosts, or their names ("gpu-a[01-04],cpu-01").
        gpus: Cards per host; 0 = hosts without cards.
        model: Of the cards; a name or short name of drivers/cards.py.
        seed: Another seed is another fleet: serials, noise, which cards idle.
        prefix: Of the names when `nodes` is a number: gpu-001, gpu-002, ...
    """

    nodes: int | str
    gpus: int = 8
    model: str = "H100"
    seed: int = 1
    prefix: str = "gpu-"


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[node]]`: hosts that differ from `[fleet]`, and where they stand.

    Attributes:
        node: Names, hostlist or pattern.
        gpus: Cards per host.
        model: Of the cards.
        labels: What these hosts share, as `[labels]` of their agents would say: rack, leaf_switch, pool, ...
    """

    node: str
    gpus: int | None = None
    model: str | None = None
    labels: dict[str, str] = {}


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[load]]`: what jobs do on some cards for a while; the last that matches wins.

    Attributes:
        node: Names, hostlist or pattern; "*" = all.
        gpu: Cards by number; "*" = all.
        at: Seconds after the start.
        until: Seconds after the start; absent = to the end.
        kind: idle, train (steady) or inference (comes and goes).
        util: Mean utilisation in percent; absent = as usual for the kind.
    """

    node: str = "*"
    gpu: Cards = "*"
    at: float = 0.0
    until: float | None = None
    kind: Literal["idle", "train", "inference"] = "train"
    util: float | None = None


class Expect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rule must fire on a fault, and within how many seconds of its start."""

    rule: str
    within_s: float


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[fault]]`: what goes wrong; kinds and parameters are those of `KINDS`."""

    node: str
    kind: str
    at: float = 0.0
    until: float | None = None
    gpu: Cards | None = None
    params: dict[str, Param] = {}
    expect: Expect | None = None

    def active(self, t: float) -> bool:
        """Whether it holds at `t`. A reboot holds while the host is down."""
        return self.at <= t < self.end

    @property
    def end(self) -> float:
        """When it is over; infinity when never."""
        if self.kind == "reboot":
            return self.at + self.number("down_s")
        return math.inf if self.until is None else self.until

    def param(self, name: str) -> Param | None:
        """The parameter, or its default."""
        return self.params.get(name, KINDS[self.kind].params[name].default)

    def number(self, name: str) -> float:
        """A parameter that is a number and has a default."""
        value = self.param(name)
        if isinstance(value, str) or value is None:
            raise TypeError(f"{self.kind}.{name} is no number")
        return float(value)


@dataclass(frozen=True, slots=True)
class Expected:
    """One fault on one entity that a rule must find.

    Attributes:
        fault: Its place among the scenario's faults, from 0.
        node: Where.
        entity: `gpu:<UUID>` (of the board that should be there), `port:<device>/<port>`, `dimm:<place>`,
            `mount:<path>`, `disk:<name>` or `node:`.
        kind: Of the fault.
        at: Its start, seconds.
        rule: The rule that must fire.
        within_s: How long that may take.
    """

    fault: int
    node: str
    entity: str
    kind: str
    at: float
    rule: str
    within_s: float


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. Use `load` or `parse`: they also check what the types cannot say."""

    fleet: Fleet
    node: tuple[Node, ...] = ()
    load: tuple[Load, ...] = ()
    fault: tuple[Fault, ...] = ()

    def node_names(self) -> tuple[str, ...]:
        """Every host, in order."""
        nodes = self.fleet.nodes
        if isinstance(nodes, str):
            return expand(nodes)
        digits = max(3, len(str(nodes)))
        return tuple(f"{self.fleet.prefix}{number:0{digits}d}" for number in range(1, nodes + 1))

    def gpu_count(self, node: str) -> int:
        """Cards that host should have."""
        counts = [one.gpus for one in self.node if one.gpus is not None and matches(one.node, node)]
        return counts[-1] if counts else self.fleet.gpus

    def model(self, node: str) -> cards.Model:
        """Of that host's cards."""
        names = [one.model for one in self.node if one.model is not None and matches(one.node, node)]
        return cards.model(names[-1] if names else self.fleet.model)

    def labels(self, node: str) -> dict[str, str]:
        """Of that host; of several blocks that name one label the last holds."""
        found: dict[str, str] = {}
        for one in self.node:
            if one.labels and matches(one.node, node):
                found |= one.labels
        return found

    def faults(self, node: str, gpu: int | None = None) -> tuple[Fault, ...]:
        """Those of a host, or of one of its cards, in the order of the file."""
        return tuple(
            fault
            for fault in self.fault
            if KINDS[fault.kind].card == (gpu is not None)
            and matches(fault.node, node)
            and (gpu is None or gpu in select(fault.gpu, self.gpu_count(node)))
        )

    def loads(self, node: str, gpu: int) -> tuple[Load, ...]:
        """Those of one card in the order of the file, the one without a `[[load]]` first.

        By default a card trains, but about one in ten of those without a fault idles.
        """
        spare = not self.faults(node, gpu) and cards.number(self.fleet.seed, node, gpu, "spare") % 10 == 0
        usual = Load(kind="idle" if spare else "train")
        count = self.gpu_count(node)
        return usual, *(one for one in self.load if matches(one.node, node) and gpu in select(one.gpu, count))

    def running(self, node: str, t: float) -> bool:
        """Whether that host's agent runs: not while it is stopped or its host is down."""
        stops = ("agent_stopped", "reboot")
        return not any(fault.kind in stops and fault.active(t) for fault in self.faults(node))

    def clock_offset_s(self, node: str, t: float) -> float:
        """By how much that host's wall clock is off."""
        skews = [fault for fault in self.faults(node) if fault.kind == "clock_skew" and fault.active(t)]
        return sum(fault.number("offset_s") for fault in skews)

    def host(
        self, node: str, clock: Callable[[], float], started_us: int, progress: Progress | None = None
    ) -> "SimulatedHost":
        """One host in this process, where a hang is a virtual time-out; see `SimulatedHost`."""
        # here, because the driver reads scenarios and so imports this module
        from gpufleet_agent.drivers.simulated import SimulatedHost

        return SimulatedHost(self, node, started_us, clock, progress)

    def inventory_csv(self) -> str:
        """Every card that should exist, absent and swapped ones too, as `fleet inventory import` takes it."""
        rows: list[tuple[str, ...]] = [
            (node, board.uuid, board.serial, board.pci, self.model(node).name)
            for node, _, board in self._boards()
        ]
        return _csv(("node", "uuid", "serial", "pci", "model"), rows)

    def baseline_csv(self) -> str:
        """What every card's busy clock and host-to-device bench looked like when accepted."""
        # here, because measuring needs the host interface and reading a scenario does not
        from gpufleet_agent.benches import h2d as bench
        from gpufleet_agent.measure import params_hash

        series = f"h2d/{bench.VERSION}/{bench.CONVENTION}/{params_hash(bench.PARAMS)}"
        rows: list[tuple[str, ...]] = []
        for node, _, board in self._boards():
            model = self.model(node)
            entity = f"gpu:{board.uuid}"
            clock = cards.busy_clock_mhz(model, board)
            h2d = cards.h2d_gb_per_s(model, board, model.pcie_gen, 16)
            rows.append((node, entity, "sm_clock_busy_mhz", f"{clock:g}", "0.005", "60"))
            key = f"{series}/pcie{model.pcie_gen}x16"
            rows.append((node, entity, key, f"{h2d:.3f}", f"{cards.H2D_SPREAD:g}", "20"))
        return _csv(("node", "entity", "key", "value", "spread", "n"), rows)

    def faults_expected(self) -> tuple[Expected, ...]:
        """Every fault with `expect`, once per entity it hits."""
        found: list[Expected] = []
        for index, fault in enumerate(self.fault):
            if fault.expect is None:
                continue
            for node in (name for name in self.node_names() if matches(fault.node, name)):
                kind = KINDS[fault.kind]
                entities = [kind.entity.format_map({name: fault.param(name) for name in kind.params})]
                if kind.card:
                    numbers = select(fault.gpu, self.gpu_count(node))
                    entities = [f"gpu:{self._board(node, number).uuid}" for number in numbers]
                    if KINDS[fault.kind].port:
                        entities = [f"port:mlx5_{number}/1" for number in numbers]
                found += [
                    Expected(
                        index, node, entity, fault.kind, fault.at, fault.expect.rule, fault.expect.within_s
                    )
                    for entity in entities
                ]
        return tuple(found)

    def _boards(self) -> list[tuple[str, int, cards.Board]]:
        return [
            (node, slot, self._board(node, slot))
            for node in self.node_names()
            for slot in range(self.gpu_count(node))
        ]

    def _board(self, node: str, slot: int) -> cards.Board:
        return cards.board(self.fleet.seed, node, slot, 0, self.model(node))


def load(path: Path) -> Scenario:
    """Read and check a scenario file.

    Raises:
        ConfigError: One line that names the file, the key and what to do.
    """
    scenario = config.load(path, Scenario)
    _check(scenario, str(path))
    return scenario


def parse(text: bytes, name: str = "scenario") -> Scenario:
    """Like `load`, on bytes already read; `name` is how errors call them."""
    scenario = config.parse(text, Scenario, name)
    _check(scenario, name)
    return scenario


def expand(hostlist: str) -> tuple[str, ...]:
    """`gpu-[001-003,7],cpu-01` -> five names. Ranges keep the zeros of their first number.

    Raises:
        ValueError: Brackets that do not match, a range that runs backwards, or too many names.
    """
    names: list[str] = []
    for part in _split(hostlist):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if any("[" in piece or "]" in piece for piece in pieces):
            raise ValueError(f"brackets do not match in {part!r}")
        choices = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        if math.prod(map(len, choices)) + len(names) > _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES} names")
        names += ["".join(choice) for choice in product(*choices)]
    return tuple(dict.fromkeys(names))


def matches(selector: str, node: str) -> bool:
    """Whether `node` is one of a selector's names; `*` and `?` stand for any text and any letter."""
    names, patterns = _selector(selector)
    return node in names or any(fnmatchcase(node, pattern) for pattern in patterns)


@lru_cache(maxsize=1024)
def _selector(selector: str) -> tuple[frozenset[str], tuple[str, ...]]:
    names = expand(selector)
    return frozenset(names), tuple(name for name in names if "*" in name or "?" in name)


def select(gpu: Cards | None, count: int) -> tuple[int, ...]:
    """The numbers of the cards that `gpu` means on a host that has `count`."""
    if gpu is None:
        return ()
    if isinstance(gpu, str):
        return tuple(range(count))
    return (gpu,) if isinstance(gpu, int) else tuple(gpu)


def _split(hostlist: str) -> list[str]:
    """At the commas outside of brackets."""
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", hostlist)]
    if not all(parts):
        raise ValueError("an empty name")
    return parts


def _numbers(ranges: str) -> list[str]:
    texts: list[str] = []
    for one in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", one.strip())
        if match is None:
            raise ValueError(f"[{ranges}] is no range: write [001-004] or [1,3]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_NODES:
            raise ValueError(f"[{ranges}] runs backwards or too far")
        texts += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return texts


def _check(scenario: Scenario, name: str) -> None:
    """What types cannot say.

    Raises:
        ConfigError: The first thing wrong.
    """
    try:
        _check_fleet(scenario)
        names = scenario.node_names()
        for index, node in enumerate(scenario.node):
            _check_node(node, names, f"node[{index}]")
        for index, load_ in enumerate(scenario.load):
            _check_load(scenario, load_, names, f"load[{index}]")
        for index, fault in enumerate(scenario.fault):
            _check_fault(scenario, fault, names, f"fault[{index}]")
    except _WrongError as wrong:
        raise ConfigError(f"{name}: {wrong}") from wrong


class _WrongError(Exception):
    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"key {key}: {what}")


def _check_fleet(scenario: Scenario) -> None:
    fleet = scenario.fleet
    if isinstance(fleet.nodes, int):
        if not 1 <= fleet.nodes <= _MOST_NODES:
            raise _WrongError(
                "fleet.nodes", f"{fleet.nodes}: give a number from 1 to {_MOST_NODES}, or names"
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", fleet.prefix):
            raise _WrongError("fleet.prefix", f"{fleet.prefix!r}: letters, digits, dots and dashes only")
    else:
        for name in _names(fleet.nodes, "fleet.nodes"):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
                raise _WrongError("fleet.nodes", f"{name!r} is no host name")
    _check_gpus(fleet.gpus, "fleet.gpus")
    _check_model(fleet.model, "fleet.model")


def _check_gpus(gpus: int, key: str) -> None:
    if not 0 <= gpus <= _MOST_GPUS:
        raise _WrongError(key, f"{gpus}: give a number from 0 to {_MOST_GPUS}")


def _check_model(model: str, key: str) -> None:
    try:
        cards.model(model)
    except KeyError as error:
        known = ", ".join(cards.SHORT)
        raise _WrongError(key, f"{model!r} is not simulated: use one of {known}") from error


def _check_node(node: Node, names: tuple[str, ...], key: str) -> None:
    _chosen(node.node, names, f"{key}.node")
    if node.gpus is not None:
        _check_gpus(node.gpus, f"{key}.gpus")
    if node.model is not None:
        _check_model(node.model, f"{key}.model")
    wrong = labels.first_wrong(node.labels)
    if wrong is not None:
        raise _WrongError(f"{key}.labels.{wrong[0]}".rstrip("."), wrong[1])


def _check_load(scenario: Scenario, one: Load, names: tuple[str, ...], key: str) -> None:
    _check_times(one.at, one.until, key)
    chosen = _chosen(one.node, names, f"{key}.node")
    if one.gpu != "*":
        _check_cards(scenario, one.gpu, chosen, f"{key}.gpu")
    if one.util is not None and not 0 <= one.util <= 100:
        raise _WrongError(f"{key}.util", f"{one.util:g}: give a percentage from 0 to 100")
    if one.kind == "idle" and one.util:
        raise _WrongError(f"{key}.util", "an idle card has none: remove it or use another kind")


def _check_fault(scenario: Scenario, fault: Fault, names: tuple[str, ...], key: str) -> None:
    kind = KINDS.get(fault.kind)
    if kind is None:
        raise _WrongError(f"{key}.kind", f"{fault.kind!r} is unknown: use one of {', '.join(KINDS)}")
    _check_times(fault.at, fault.until, key)
    if fault.until is not None and not kind.until:
        raise _WrongError(f"{key}.until", f"a {fault.kind} has no end of its own: remove it")
    chosen = _chosen(fault.node, names, f"{key}.node")
    if kind.card and fault.gpu is None:
        raise _WrongError(f"{key}.gpu", f'{fault.kind} hits cards: say which, e.g. gpu = 0 or gpu = "*"')
    if kind.card and fault.gpu is not None:
        _check_cards(scenario, fault.gpu, chosen, f"{key}.gpu")
    if not kind.card and fault.gpu is not None:
        raise _WrongError(f"{key}.gpu", f"{fault.kind} hits the whole host: remove it")
    if fault.kind == "driver_not_loaded" and not all(map(scenario.gpu_count, chosen)):
        raise _WrongError(f"{key}.node", "a host without cards needs no driver: choose hosts that have some")
    _check_model_has(scenario, fault, chosen, key)
    _check_params(fault, kind, key)
    if fault.expect is not None:
        _check_expect(fault.expect, key)


_NEEDS: dict[str, Callable[[cards.Model], bool]] = {
    "ecc_uncorrectable": lambda model: model.ecc,
    "ecc_corrected": lambda model: model.ecc,
    "sram_threshold": lambda model: model.banks > 0,
    "remap_pending": lambda model: model.banks > 0,
    "remap_failed": lambda model: model.banks > 0,
    "mig_on": lambda model: model.mig,
    "fabric_stuck": lambda model: model.fabric,
    "nvlink_down": lambda model: model.nvlinks_wired > 0,
    "nvlink_errors": lambda model: model.nvlinks_wired > 0,
    "nvlink_training": lambda model: model.nvlinks_wired > 0,
    "pcie_replays": lambda model: model.own_memory and not model.guest,
    "aer_errors": lambda model: not model.guest,
    "recovery_action": lambda model: not model.guest,
    **{name: lambda model: model.infiniband_gbps > 0 for name, kind in KINDS.items() if kind.port},
}
"""What a card must have for a fault to show."""


def _check_model_has(scenario: Scenario, fault: Fault, nodes: tuple[str, ...], key: str) -> None:
    needs = _NEEDS.get(fault.kind)
    for model in {scenario.model(node) for node in nodes if scenario.gpu_count(node)} if needs else ():
        if needs is not None and not needs(model):
            raise _WrongError(f"{key}.kind", f"a {model.name} has nothing that shows {fault.kind}")


def _check_params(fault: Fault, kind: Kind, key: str) -> None:
    for name, value in fault.params.items():
        where = f"{key}.params.{name}"
        accepts = kind.params.get(name)
        if accepts is None:
            known = ", ".join(kind.params) or "none"
            raise _WrongError(where, f"{fault.kind} does not know it: remove it (it knows: {known})")
        if accepts.words:
            if value not in accepts.words or isinstance(value, bool):
                known = ", ".join(map(str, accepts.words))
                raise _WrongError(where, f"{value!r}: use one of {known}")
        elif isinstance(accepts.default, str):
            if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.\[\]-]{1,64}", value):
                raise _WrongError(where, f"{value!r}: use letters, digits, _ . - [ ]")
        elif isinstance(value, bool | str) or not accepts.low <= value <= accepts.high:
            raise _WrongError(where, f"{value!r}: give a number from {accepts.low:g} to {accepts.high:g}")


def _check_expect(expect: Expect, key: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", expect.rule):
        raise _WrongError(f"{key}.expect.rule", f"{expect.rule!r} is no rule name")
    if not 0 < expect.within_s < math.inf:
        raise _WrongError(f"{key}.expect.within_s", f"{expect.within_s:g}: give seconds above 0")


def _check_times(at: float, until: float | None, key: str) -> None:
    if not 0 <= at < math.inf:
        raise _WrongError(f"{key}.at", f"{at:g}: give seconds from the start, 0 or more")
    if until is not None and not until > at:
        raise _WrongError(f"{key}.until", f"{until:g}: it must be after at = {at:g}")


def _check_cards(scenario: Scenario, gpu: Cards, nodes: tuple[str, ...], key: str) -> None:
    if isinstance(gpu, str):
        if gpu != "*":
            raise _WrongError(key, f'{gpu!r}: give a number, a list of numbers, or "*"')
        if not any(map(scenario.gpu_count, nodes)):
            raise _WrongError(key, "those hosts have no cards")
        return
    numbers = select(gpu, 0)
    if not numbers:
        raise _WrongError(key, 'an empty list: give a number, a list of numbers, or "*"')
    for node in nodes:
        count = scenario.gpu_count(node)
        for number in numbers:
            if not 0 <= number < count:
                has = f"cards 0 to {count - 1}" if count else "no cards"
                raise _WrongError(key, f"{number}: {node} has {has}")


def _chosen(selector: str, names: tuple[str, ...], key: str) -> tuple[str, ...]:
    """The hosts that a selector means; each of its parts must mean one."""
    patterns = _names(selector, key)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise _WrongError(key, f"{pattern!r} is no host of this fleet ({names[0]} to {names[-1]})")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _names(hostlist: str, key: str) -> tuple[str, ...]:
    try:
        return expand(hostlist)
    except ValueError as error:
        raise _WrongError(key, str(error)) from error


def _csv(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
