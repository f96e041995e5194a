"""A simulated card's life as phases: stretches of time in which its scenario changes nothing.

Everything about a card at a time is a closed form of its phase, so that any process, also one started again,
computes the same numbers without history. Pure: no clock, no state, no global random numbers.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from gpufleet_agent.drivers import cards
from gpufleet_agent.scenario import Cards, Fault, Load, Scenario, matches, select

IDLE = 1
POWER_CAP = 4
HW_THERMAL = 8 | 32 | 64
HW_BRAKE = 8 | 128

_PERIOD_S = 10.0
_USUAL_UTIL = {"idle": 0.0, "train": 95.0, "inference": 55.0}
_AMBIENT_C = 27.0
_SETTLE_S = 40.0
_OVERHEAT_S = 8.0
_BUSY = 85.0
_CLOCK_POWER = 1.6
_SPIN = 0.6
"""What a step's wait for other cards takes off the power: less than computing, more than nothing."""

_MOST_SLOTS = 16
_MASK = (1 << 64) - 1


class _Starts(Protocol):
    @property
    def start(self) -> float: ...


_Phase = TypeVar("_Phase", bound=_Starts)


class Timeline(Generic[_Phase]):
    """Phases in order of their starts; the first one also answers for what was before."""

    def __init__(self, phases: Sequence[_Phase]) -> None:
        self.phases = tuple(phases)
        self._starts = [phase.start for phase in phases]

    def at(self, t: float) -> _Phase:
        """The phase that holds at `t`."""
        return self.phases[max(0, bisect_right(self._starts, t) - 1)]


@dataclass(frozen=True, slots=True)
class NodePhase:
    """What holds for a host from `start` on.

    Attributes:
        start: Seconds since the scenario's start.
        boot: Reboots so far.
        booted_at: When this boot began, seconds since the scenario's start; negative for the first.
        epoch: Initialisations of the driver so far, from 1.
        gone: Code of `DriverGone`; empty while the driver answers.
        down: The host is rebooting.
        library: Version of the driver's library on disk; empty = that of the driver.
    """

    start: float
    boot: int
    booted_at: float
    epoch: int
    gone: str
    down: bool
    library: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Cumulative counters: seconds slowed by each cause, and energy."""

    power_cap_s: float = 0.0
    sw_thermal_s: float = 0.0
    hw_thermal_s: float = 0.0
    hw_brake_s: float = 0.0
    energy_j: float = 0.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Counts since the driver was loaded.

    `aer_`: since the boot; `life_` and remapped rows: over the board's life.
    """

    dram_corrected: float = 0.0
    dram_uncorrectable: float = 0.0
    sram_corrected: float = 0.0
    sram_uncorrectable: float = 0.0
    life_dram_corrected: float = 0.0
    life_dram_uncorrectable: float = 0.0
    life_sram_corrected: float = 0.0
    life_sram_uncorrectable: float = 0.0
    remapped_uncorrectable: float = 0.0
    replays: float = 0.0
    aer_corrected: float = 0.0
    aer_nonfatal: float = 0.0
    aer_fatal: float = 0.0
    port_aer_corrected: float = 0.0
    port_aer_nonfatal: float = 0.0
    port_aer_fatal: float = 0.0

    def plus(self, **counts: float) -> "Errors":
        """These errors on top."""
        return replace(self, **{name: getattr(self, name) + count for name, count in counts.items()})

    def reloaded(self, rebooted: bool) -> "Errors":
        """What is left when the driver is loaded anew; the kernel's own counts are, but for a reboot."""
        kept = ["life_dram_corrected", "life_dram_uncorrectable", "life_sram_corrected",
                "life_sram_uncorrectable", "remapped_uncorrectable"]  # fmt: skip
        if not rebooted:
            kept += [name for name in Errors.__dataclass_fields__ if "aer_" in name]
        return Errors(**{name: getattr(self, name) for name in kept})


@dataclass(frozen=True, slots=True)
class CardPhase:
    """What holds for a card from `start` on.

    `cut` marks what holds in the slowed part of each ten seconds (`duty` of them) while hardware cuts the
    clock. `gen` is the link's generation under load. `starved` is the part of each step in which the card
    waits for data, `slowed` that in which some card of its job does: the others wait for it in collectives.
    """

    start: float
    board: cards.Board
    epoch: int
    listed: bool = True
    lost: bool = False
    hang: str = ""
    bus: str = "ok"
    bound: bool = True
    kind: str = "idle"
    util: float = 0.0
    steady: bool = True
    clock: float = 0.0
    clock_cut: float = 0.0
    power: float = 0.0
    power_cut: float = 0.0
    limit_w: float = 0.0
    reasons: int = 0
    reasons_cut: int = 0
    duty: float = 0.0
    sw_thermal: float = 0.0
    hw_thermal: float = 0.0
    hw_brake: float = 0.0
    gen: int = 1
    width: int = 16
    h2d: float = 1.0
    corrupts: float = 0.0
    target_c: float = _AMBIENT_C
    settle_s: float = _SETTLE_S
    start_c: float = _AMBIENT_C
    before: Totals = Totals()
    lost_code: str = ""
    excluded: bool = False
    action: str = "none"
    remap_pending: bool = False
    remap_failed: bool = False
    sram_threshold: bool = False
    mig: bool = False
    persistence: bool = True
    fabric: str = "completed"
    rates: Errors = Errors()
    errors_before: Errors = Errors()
    boot: int = 0
    starved: float = 0.0
    slowed: float = 0.0

    def is_cut(self, t: float) -> bool:
        """Whether hardware slows the card at this very moment."""
        return (t - self.start) % _PERIOD_S < self.duty * _PERIOD_S

    def gen_now(self, model: cards.Model) -> int:
        """The link's generation: some models save power when idle."""
        return self.gen if self.util else min(self.gen, model.pcie_gen_idle)

    def temperature_c(self, t: float) -> float:
        """Settles exponentially to what the power makes of it."""
        settled = math.exp(-max(0.0, t - self.start) / self.settle_s)
        return self.target_c + (self.start_c - self.target_c) * settled

    def errors(self, t: float) -> Errors:
        """The counts of errors at `t`; `rates` are per second."""
        passed = max(0.0, t - self.start)
        names = Errors.__dataclass_fields__
        return self.errors_before.plus(**{name: getattr(self.rates, name) * passed for name in names})

    def totals(self, t: float) -> Totals:
        """The cumulative counters at `t`."""
        passed = max(0.0, t - self.start)
        cut = _slowed(passed, self.duty)
        before = self.before
        return Totals(
            before.power_cap_s
            + (passed - cut) * bool(self.reasons & POWER_CAP)
            + cut * bool(self.reasons_cut & POWER_CAP),
            before.sw_thermal_s + _slowed(passed, self.sw_thermal),
            before.hw_thermal_s + _slowed(passed, self.hw_thermal),
            before.hw_brake_s + _slowed(passed, self.hw_brake),
            before.energy_j + (passed - cut) * self.power + cut * self.power_cut,
        )


def noise(key: int, second: int) -> int:
    """64 even bits for one card and second: the same in every process (splitmix64)."""
    x = (key + second * 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def uptime_at_start_s(scenario: Scenario, node: str) -> float:
    """How long a host had been up when the scenario began: 3 to 40 days."""
    return 259_200.0 + cards.number(scenario.fleet.seed, node, "uptime") % 3_196_800


def node_timeline(scenario: Scenario, node: str) -> Timeline[NodePhase]:
    """Boots and driver loads of one host."""
    faults = scenario.faults(node)
    reboots = [fault for fault in faults if fault.kind == "reboot"]
    unloads = [fault for fault in faults if fault.kind == "driver_not_loaded"]
    reloads = [fault.end for fault in (*reboots, *unloads)] + [
        when for slot in range(scenario.gpu_count(node)) for when in _swaps(scenario.faults(node, slot))
    ]
    first = -uptime_at_start_s(scenario, node)
    phases: list[NodePhase] = []
    upgrades = [fault for fault in faults if fault.kind == "library_upgraded"]
    for start in _starts((*reboots, *unloads, *upgrades), reloads):
        done = [fault.end for fault in reboots if fault.end <= start]
        gone = [fault for fault in unloads if fault.active(start)]
        phases.append(
            NodePhase(
                start,
                boot=len(done),
                booted_at=max(done, default=first),
                # things that end at the same time are one re-initialisation
                epoch=1 + len({when for when in reloads if when <= start}),
                gone=str(gone[-1].param("code")) if gone else "",
                down=any(fault.active(start) for fault in reboots),
                library=next((str(one.param("version")) for one in upgrades if one.active(start)), ""),
            )
        )
    return Timeline(phases)


def card_timeline(scenario: Scenario, node: str, slot: int, host: Timeline[NodePhase]) -> Timeline[CardPhase]:
    """The life of the card in one slot."""
    model = scenario.model(node)
    faults, loads = scenario.faults(node, slot), scenario.loads(node, slot)
    times = [one.start for one in host.phases] + [
        when for load in loads for when in (load.at, load.until) if when is not None
    ]
    starvations = [fault for fault in scenario.fault if fault.kind == "data_starved"]
    phases: list[CardPhase] = []
    for start in _starts((*faults, *starvations), times):
        swapped = sum(when <= start for when in _swaps(faults))
        board = cards.board(scenario.fleet.seed, node, slot, swapped, model)
        active = [fault for fault in faults if fault.active(start)]
        load = load_at(loads, start)
        phase = _phase(
            start, model, board, host.at(start), load, active, slowest(scenario, node, load, start)
        )
        phase = _healthy(_seen(phase, active, host), active)
        begun = [fault for fault in active if fault.at == start]
        phases.append(_continue(phase, phases, model, scenario, node, begun))
    return Timeline(phases)


def load_at(loads: Sequence[Load], t: float) -> Load:
    """The load that a card has at `t`: the last that holds."""
    return [one for one in loads if one.at <= t and (one.until is None or t < one.until)][-1]


def slowest(scenario: Scenario, node: str, load: Load, t: float) -> float:
    """The largest part of a step that some card of the same job waits for data.

    Cards that one `[[load]]` trains are one job; without one, the cards of a host are.
    """
    share = 0.0
    for fault in scenario.fault:
        if fault.kind != "data_starved" or not fault.active(t) or load.kind != "train":
            continue
        if load in scenario.load:
            meets = any(
                matches(fault.node, name) and _meet(load.gpu, fault.gpu)
                for name in scenario.node_names()
                if matches(load.node, name)
            )
        else:
            meets = matches(fault.node, node)
        if meets:
            share = max(share, fault.number("share"))
    return share


def _meet(one: Cards, other: Cards | None) -> bool:
    """Whether two choices of cards have one in common."""
    return bool({*select(one, _MOST_SLOTS)} & {*select(other, _MOST_SLOTS)})


def _starts(faults: Iterable[Fault], times: Iterable[float]) -> list[float]:
    ends = [when for fault in faults for when in (fault.at, fault.end)]
    return sorted({0.0, *(when for when in (*ends, *times) if 0 <= when < math.inf)})


def _swaps(faults: Iterable[Fault]) -> list[float]:
    """When another board comes into the slot. At the end of a swap that is yet another one."""
    swaps = [when for fault in faults if fault.kind == "board_swap" for when in (fault.at, fault.end)]
    return [when for when in swaps if when < math.inf]


def _phase(
    start: float,
    model: cards.Model,
    board: cards.Board,
    host: NodePhase,
    load: Load,
    active: Sequence[Fault],
    slowed: float,
) -> CardPhase:
    """Load, clocks, power and heat, without what came before."""
    if host.down:
        return CardPhase(
            start,
            board,
            host.epoch,
            listed=False,
            limit_w=model.power_limit_w,
            gen=model.pcie_gen,
            boot=host.boot,
        )
    util = _USUAL_UTIL[load.kind] if load.util is None else load.util
    phase = CardPhase(start, board, host.epoch, kind=load.kind if util else "idle", util=util)
    phase = replace(phase, boot=host.boot)
    if phase.kind == "train":
        shares = [fault.number("share") for fault in active if fault.kind == "data_starved"]
        phase = replace(phase, starved=max(shares, default=0.0), slowed=slowed)
        # who waits for data is idle; who waits for the others' data spins in a collective and looks busy
        phase = replace(phase, util=util * (1 - phase.starved))
    phase = _clocks(replace(phase, limit_w=model.power_limit_w), model, active)
    phase = replace(
        phase,
        power=_power(model, board, phase.clock, phase, util),
        power_cut=_power(model, board, phase.clock_cut, phase, util),
        gen=model.pcie_gen,
    )
    mean = phase.power + (phase.power_cut - phase.power) * phase.duty
    ambient = _AMBIENT_C + board.key % 4
    target = ambient + (model.warm_c - _AMBIENT_C) * mean / model.power_busy_w
    if phase.hw_thermal:
        return replace(phase, target_c=model.slowdown_c + 1.5, settle_s=_OVERHEAT_S)
    return replace(phase, target_c=target)


def _clocks(phase: CardPhase, model: cards.Model, active: Sequence[Fault]) -> CardPhase:
    """Clocks, their reasons and the power limit under the faults that hold."""
    busy = phase.util > 0
    full = cards.busy_clock_mhz(model, phase.board)
    clock = full if busy else float(model.sm_clock_idle_mhz)
    capped = busy and model.power_capped and phase.util >= _BUSY
    reasons = 0 if busy and not capped else POWER_CAP if capped else IDLE
    limit, steady, cut, cut_reasons = phase.limit_w, not busy, 1.0, 0
    duties = {"hw_thermal": 0.0, "hw_brake": 0.0}
    for fault in active:
        if fault.kind == "clock_pinned":
            mhz = fault.param("mhz")
            clock = min(clock, full * fault.number("ratio") if mhz is None else fault.number("mhz"))
            reasons, steady = reasons & ~POWER_CAP, True
        elif fault.kind == "sw_power_cap":
            limit = limit if fault.param("limit_w") is None else fault.number("limit_w")
            if busy:
                clock *= _capped(model, fault, limit)
                reasons |= POWER_CAP
        elif fault.kind == "hw_brake" or (fault.kind == "hw_thermal" and busy):
            duties[fault.kind] = max(duties[fault.kind], fault.number("duty"))
            cut = min(cut, fault.number("ratio"))
            cut_reasons |= HW_BRAKE if fault.kind == "hw_brake" else HW_THERMAL
    return replace(
        phase,
        clock=clock,
        clock_cut=clock * cut if busy else clock,
        steady=steady,
        limit_w=limit,
        reasons=reasons,
        # a clock that hardware cuts no longer runs into the power limit
        reasons_cut=(reasons & ~POWER_CAP) | cut_reasons if cut_reasons else reasons,
        duty=max(duties.values()),
        sw_thermal=duties["hw_thermal"],
        hw_thermal=duties["hw_thermal"],
        hw_brake=duties["hw_brake"],
    )


def _capped(model: cards.Model, fault: Fault, limit: float) -> float:
    """What a power cap leaves of the clock: as said, or by the power that a lower limit allows."""
    if "ratio" in fault.params or fault.param("limit_w") is None:
        return fault.number("ratio")
    dynamic = model.power_busy_w - model.power_idle_w
    left = max(0.02, (0.98 * limit - model.power_idle_w) / dynamic)
    return min(1.0, math.pow(left, 1 / _CLOCK_POWER))


def _power(model: cards.Model, board: cards.Board, clock: float, phase: CardPhase, util: float) -> float:
    if not util:
        return model.power_idle_w * (1 + 0.03 * (board.key % 5 - 2))
    full = cards.busy_clock_mhz(model, board)
    strength = math.pow(min(1.0, util / _USUAL_UTIL["train"]), 0.8) * math.pow(clock / full, _CLOCK_POWER)
    dynamic = (model.power_busy_w - model.power_idle_w) * strength
    waits = phase.starved + _SPIN * max(0.0, phase.slowed - phase.starved)
    return min(model.power_idle_w + dynamic * (1 - waits), 0.985 * phase.limit_w)


def _seen(phase: CardPhase, active: Sequence[Fault], host: Timeline[NodePhase]) -> CardPhase:
    """Who still sees the card, over which link; and whether it answers."""
    now = host.at(phase.start)
    phase = replace(phase, bound=now.gone != "driver_not_loaded")
    for fault in active:
        if fault.kind == "card_lost":
            # a lost card is seen until the driver looks for its cards again
            again = now.epoch > host.at(fault.at).epoch
            gone = "absent" if again else str(fault.param("bus"))
            phase = replace(phase, lost=True, bus=gone, listed=phase.listed and not again)
            phase = replace(phase, lost_code=str(fault.param("code")))
        elif fault.kind == "card_absent":
            where = fault.param("where")
            # the kernel module holds a card that it was told to leave alone
            phase = replace(phase, listed=False, bound=where == "excluded", excluded=where == "excluded")
            phase = replace(phase, bus="absent" if where == "bus" else phase.bus)
        elif fault.kind == "driver_hang":
            phase = replace(phase, hang=str(fault.param("call")))
        elif fault.kind == "pcie_width":
            phase = replace(phase, width=min(phase.width, int(fault.number("width"))))
        elif fault.kind == "pcie_gen":
            phase = replace(phase, gen=min(phase.gen, int(fault.number("gen"))))
        elif fault.kind == "h2d_drop":
            phase = replace(phase, h2d=phase.h2d * (1 - fault.number("loss")))
    return phase


def _healthy(phase: CardPhase, active: Sequence[Fault]) -> CardPhase:
    """What ails the card but does not slow it."""
    for fault in active:
        if fault.kind == "ecc_corrected":
            rate, where = fault.number("per_hour") / 3600, fault.param("where")
            counts = {f"{where}_corrected": rate, f"life_{where}_corrected": rate}
            phase = replace(phase, rates=phase.rates.plus(**counts))
        elif fault.kind == "pcie_replays":
            phase = replace(phase, rates=phase.rates.plus(replays=fault.number("per_minute") / 60))
        elif fault.kind == "aer_errors":
            end = "port_" if fault.param("end") == "port" else ""
            name = f"{end}aer_{fault.param('severity')}"
            phase = replace(phase, rates=phase.rates.plus(**{name: fault.number("per_minute") / 60}))
        elif fault.kind == "sram_threshold":
            phase = replace(phase, sram_threshold=True)
        elif fault.kind == "remap_pending":
            phase = replace(phase, remap_pending=True)
        elif fault.kind == "remap_failed":
            phase = replace(phase, remap_failed=True)
        elif fault.kind == "silent_corruption":
            phase = replace(phase, corrupts=max(phase.corrupts, fault.number("share")))
        elif fault.kind == "recovery_action":
            phase = replace(phase, action=str(fault.param("action")))
        elif fault.kind == "mig_on":
            phase = replace(phase, mig=True)
        elif fault.kind == "persistence_off":
            phase = replace(phase, persistence=False)
        elif fault.kind == "fabric_stuck":
            phase = replace(phase, fabric=str(fault.param("state")))
    return phase


def _struck(errors: Errors, begun: Sequence[Fault]) -> Errors:
    """The errors that faults bring when they begin."""
    for fault in begun:
        if fault.kind == "ecc_uncorrectable":
            count, where = fault.number("count"), fault.param("where")
            counts = {f"{where}_uncorrectable": count, f"life_{where}_uncorrectable": count}
            errors = errors.plus(**counts)
        elif fault.kind == "remap_pending":
            errors = errors.plus(remapped_uncorrectable=1)
    return errors


def _continue(
    phase: CardPhase,
    phases: Sequence[CardPhase],
    model: cards.Model,
    scenario: Scenario,
    node: str,
    begun: Sequence[Fault],
) -> CardPhase:
    """Counters and temperature go on from the last phase; counters start anew with the driver."""
    if not phases:
        up = uptime_at_start_s(scenario, node)
        worked = up * (0.5 + phase.board.key % 400 / 1000)
        capped = worked if model.power_capped else 0.0
        before = Totals(power_cap_s=capped, energy_j=worked * model.power_busy_w)
        errors = _struck(Errors(), begun)
        return replace(phase, start_c=phase.target_c, before=before, errors_before=errors)
    last = phases[-1]
    same = last.epoch == phase.epoch
    before = last.totals(phase.start) if same else Totals()
    errors = last.errors(phase.start)
    if not same:
        errors = errors.reloaded(rebooted=last.boot != phase.boot)
    errors = _struck(errors if last.board == phase.board else Errors(), begun)
    return replace(phase, start_c=last.temperature_c(phase.start), before=before, errors_before=errors)


def _slowed(passed: float, duty: float) -> float:
    """Seconds of `passed` that fell into the slowed part of their ten."""
    whole, rest = divmod(passed, _PERIOD_S)
    return whole * duty * _PERIOD_S + min(rest, duty * _PERIOD_S)
