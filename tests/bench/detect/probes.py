"""The rules of the sampled probes over seeded stretches of a fleet: rows into a store, a real pass each 5 s.

A stretch is a few minutes of a fleet in simulated time. Each host meets one thing in it at most, so that
what fires has one explanation: a fault, a disturbance that must give no finding beyond what it truly is, or
nothing. All of them happen far more often than in life; `Kind.rate` says how often they are assumed to
happen there.

A host reads its cards each 5 s at a phase of its own, the bus and the cards' health each 60 s. What it sends
is in the store when the collector would have it, not earlier: a pass sees what a pass would see. `ts` is on
the collector's clock as ingest corrects it: up to 2 s off where the agent's clock is that close, and no more
off than the way takes where it is further off.
"""

import heapq
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np
from tests.bench.detect.world import CARDS, MODELS

from gpufleet_agent.probes import PROBES as SAMPLED
from gpufleet_agent.probes import agent
from gpufleet_collector.findings import Finding
from gpufleet_collector.judge import Judge
from gpufleet_collector.limits import JudgeOptions, JudgeSettings
from gpufleet_collector.rules import load_rules
from gpufleet_collector.store import LIVE, Column, Store

START = datetime(2026, 3, 1)
SWEEP_S, SLOW_S, PASS_S = 5.0, 60.0, 5
WAY_S = 0.9
"""What a row is on its way at most, and a sweep late."""

RUN_IN_S = 150
"""Rows are there from the beginning; the first pass is made now."""

LONG_S = 450
"""In less there are no four whole minutes for a pinned clock."""

RULES = (
    "agent_restarted", "agent_silent", "clock_skew", "driver_hung", "driver_mismatch", "ecc_uncorrectable",
    "gpu_downclocked", "gpu_hot", "gpu_missing", "node_rebooted", "pcie_speed", "pcie_width", "power_limit",
    "recovery_action", "remap_failed", "temperature_margin", "xid",
)  # fmt: skip
CLOCKS = (1980.0, 1980.0, 1410.0)
"""MHz under load, of each of `MODELS`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What may happen to a host.

    Attributes:
        explains: Rules, or "rule/code", whose findings on this host it explains.
        wanted: "rule/code" that a fault must give; empty = a disturbance.
        rate: Disturbances of this kind that 1,000 GPU-days (125 host-days) are assumed to bring.
        apart_s: It comes again and again, this far apart; 0 = once.
        every_s: What shows a fault is read so often, ...
        samples: ... and so many samples fire, 0 = its rule judges time.
        rule_s: How often the rule is judged.
        busy: Only a loaded card shows it.
        whole: All cards of the host.
    """

    explains: frozenset[str] = frozenset()
    wanted: str = ""
    rate: float = 0.0
    apart_s: float = 0.0
    every_s: float = SWEEP_S
    samples: int = 0
    rule_s: float = PASS_S
    busy: bool = False
    whole: bool = False

    @property
    def bound_s(self) -> float:
        """The samples it needs, one judgement, and what a sample is on its way."""
        return self.samples * self.every_s + self.rule_s + WAY_S


def _fault(
    wanted: str,
    samples: int,
    *,
    every_s: float = SWEEP_S,
    rule_s: float = PASS_S,
    busy: bool = False,
    whole: bool = False,
) -> Kind:
    return Kind(
        frozenset({wanted}), wanted, every_s=every_s, samples=samples, rule_s=rule_s, busy=busy, whole=whole
    )


FAULTS: Mapping[str, Kind] = {
    "card lost": _fault("gpu_missing/lost_at_run_time", 2),
    "card not listed": _fault("gpu_missing/refused_by_driver", 2),
    "card off the bus": _fault("gpu_missing/gone_from_bus", 2, every_s=SLOW_S),
    "all cards lost": _fault("gpu_missing/lost_at_run_time", 2, whole=True),
    "power brake": _fault("gpu_downclocked/power_brake", 2, busy=True),
    "hardware thermal": _fault("gpu_downclocked/hw_thermal", 2, busy=True),
    "clock pinned": _fault("gpu_downclocked/no_reason", 0, busy=True),
    "driver call hangs": _fault("driver_hung/card_hung", 2),
    "memory error": _fault("ecc_uncorrectable/", 1, every_s=SLOW_S, rule_s=30),
    "node silent": _fault("agent_silent/silent", 0),
}
DISTURBANCES: Mapping[str, Kind] = {
    "planned reboot": Kind(frozenset({"agent_silent/silent"}), rate=125 / 30),
    "agent restart": Kind(rate=125 / 14),
    "driver step": Kind(frozenset({"gpu_missing/driver_not_loaded"}), rate=125 / 60),
    "clock off": Kind(frozenset({"clock_skew/"}), rate=125 / 30),
    "clocks set": Kind(rate=125 / 30, busy=True),
    "missed sweeps": Kind(rate=125, apart_s=60),
    "late batches": Kind(rate=125, apart_s=110),
    "rows behind": Kind(rate=125, apart_s=40),
    "one hung read": Kind(rate=12.5, apart_s=40),
    "one blip": Kind(rate=125, apart_s=25),
    "short heat": Kind(rate=125, apart_s=90, busy=True),
    "power cap": Kind(rate=125, apart_s=150, busy=True),
    "job change": Kind(rate=1500, apart_s=70),
}
ONCE = ("one hung read", "one blip")
"""Met by one sample each time."""

KINDS = {**FAULTS, **DISTURBANCES, "nothing": Kind()}


@dataclass(frozen=True, slots=True)
class Happening:
    """What a host meets: at `times`, seconds of its stretch, on `card`."""

    kind: str
    host: int
    card: int
    times: tuple[float, ...]
    seconds: float
    """How long each lasts."""

    def on(self, at: float) -> bool:
        """Whether it is at work."""
        return any(begin <= at < begin + self.seconds for begin in self.times)

    def began(self, since: float | None, at: float) -> bool:
        """Whether it began after `since`: one sample meets it, however jittery the sweeps are."""
        return any((since is None or since < begin) and begin <= at for begin in self.times)


@dataclass(frozen=True, slots=True)
class Delay:
    """A fault and what became of it.

    Attributes:
        seconds: Until its finding fired (those of all cards, where all are hit); None = never.
        samples: How many that show it were in by then; None = its rule does not count samples.
        passes: Judgements of its rule since enough samples were in.
    """

    kind: str
    seconds: float | None
    samples: int | None
    passes: int | None


@dataclass(frozen=True, slots=True)
class Unexplained:
    """A finding that nothing planted explains; `kind` is what the host met, `at` seconds of the stretch."""

    rule: str
    code: str
    node: str
    entity: str
    at: float
    kind: str
    stretch: int


@dataclass(slots=True)
class Result:
    """What stretches gave."""

    delays: list[Delay] = field(default_factory=list)
    false: list[Unexplained] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    """How often each disturbance was met."""
    explained: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, rule/code): what truly was."""
    calm_gpu_days: float = 0.0
    gpu_days: float = 0.0
    passes: int = 0
    cpu_s: float = 0.0

    def add(self, other: "Result") -> None:
        """Take the results of other stretches in."""
        self.delays += other.delays
        self.false += other.false
        self.met += other.met
        self.explained += other.explained
        self.calm_gpu_days += other.calm_gpu_days
        self.gpu_days += other.gpu_days
        self.passes += other.passes
        self.cpu_s += other.cpu_s

    def weight(self, kind: str) -> float:
        """Findings per 1,000 GPU-days that one false finding of this kind stands for."""
        if kind in DISTURBANCES:
            return DISTURBANCES[kind].rate / max(self.met[kind], 1)
        return 1000 / max(self.calm_gpu_days, 1e-9)


@dataclass(slots=True)
class _Host:
    """One host's state; everything a sweep needs to know."""

    number: int
    model: int
    happening: Happening
    phase: float
    error_s: float
    busy: bool
    clock: list[float]
    hot: list[float]
    boot_id: str = "boot-1"
    booted: float = -3 * 86400.0
    epoch: int = 1
    driver: str = "580.95.05"
    slower: float = 1.0
    offset_s: float = 0.0
    sent: int = 0
    slow_at: float = -1e9
    last: float | None = None
    brake_s: list[float] = field(default_factory=lambda: [3.5] * CARDS)
    heat_s: list[float] = field(default_factory=lambda: [1.5] * CARDS)
    soft_s: list[float] = field(default_factory=lambda: [0.5] * CARDS)
    cap_s: list[float] = field(default_factory=lambda: [100.0] * CARDS)
    sweeps: list[tuple[float, float]] = field(default_factory=list)
    slow_sweeps: list[tuple[float, float]] = field(default_factory=list)
    """(read, received)."""

    @property
    def name(self) -> str:
        return f"n{self.number:04}"

    def uuid(self, card: int) -> str:
        return f"GPU-{self.number:04}-{card}"

    def new_counters(self) -> None:
        for counter in (self.brake_s, self.heat_s, self.soft_s, self.cap_s):
            counter[:] = [0.0] * CARDS


@dataclass(slots=True)
class _Outbox:
    """Rows on their way, by the time they are received."""

    waiting: list[tuple[float, int, str, dict[str, object]]] = field(default_factory=list)
    number: int = 0

    def put(self, received: float, table: str, row: dict[str, object]) -> None:
        self.number += 1
        heapq.heappush(self.waiting, (received, self.number, table, row))

    def due(self, at: float) -> dict[str, list[dict[str, object]]]:
        out: dict[str, list[dict[str, object]]] = {}
        while self.waiting and self.waiting[0][0] <= at:
            _, _, table, row = heapq.heappop(self.waiting)
            out.setdefault(table, []).append(row)
        return out


def play(seed: int, stretches: int, hosts: int, seconds: int, say: bool = False) -> Result:
    """So many stretches, each of a fleet of its own."""
    total = Result()
    for number in range(stretches):
        total.add(_Stretch(seed, number, hosts, seconds).play())
        if say:
            print(
                f"  seed {seed}: {number + 1} of {stretches} stretches, {total.cpu_s:.0f} s CPU: "
                f"{len(total.false)} unexplained, "
                f"{sum(one.seconds is not None for one in total.delays)} of {len(total.delays)} faults",
                flush=True,
            )
    return total


def when(at: float) -> datetime:
    """A second of a stretch as a time."""
    return START + timedelta(seconds=at)


class _Stretch:
    """One stretch: draws, reads, sends, judges, scores."""

    def __init__(self, seed: int, number: int, hosts: int, seconds: int) -> None:
        self._number = number
        self._seconds = seconds
        self._rng = np.random.default_rng((seed, number))
        # the load of the day: part of the hosts that work at this stretch's hour
        self._load = 0.6 + 0.3 * math.sin(2 * math.pi * float(self._rng.random()))
        kinds = [kind for kind in KINDS if seconds >= LONG_S or kind != "clock pinned"]
        kinds += ["nothing"] * 4
        first = number * hosts
        self._hosts = [self._host(n, kinds[(first + n) % len(kinds)]) for n in range(hosts)]
        self._outbox = _Outbox()
        self._store = Store.open(None)

    def play(self) -> Result:
        began = time.process_time()
        self._install()
        for host in self._hosts:
            self._live(host)
        rules = [rule for rule in load_rules() if rule.name in RULES]
        judge = Judge(self._store, JudgeSettings(judge=JudgeOptions(rule_timeout="10m")), rules=rules)
        result = Result()
        fired: list[tuple[float, Finding]] = []
        for at in range(RUN_IN_S, self._seconds + 1, PASS_S):
            self._deliver(at)
            report = judge.run_pass(when(at))
            bad = [run for run in report.runs if run.status != "ok"]
            if bad:
                raise RuntimeError(f"at {at} s: {[(run.rule, run.status, run.error) for run in bad]}")
            result.passes += 1
            fired += [(float(at), one) for one in report.fired]
        self._store.close()
        self._score(fired, result)
        result.cpu_s = time.process_time() - began
        return result

    # what is drawn

    def _host(self, number: int, kind: str) -> _Host:
        rng = self._rng
        begin = RUN_IN_S + float(rng.uniform(10, 50))
        what = KINDS[kind]
        seconds = {
            "planned reboot": float(rng.uniform(60, 200)),
            "agent restart": float(rng.uniform(5, 25)),
            "driver step": float(rng.uniform(20, 90)),
            "missed sweeps": 5.0 * float(rng.integers(1, 4)),
            "late batches": float(rng.uniform(15, 75)),
            "short heat": float(rng.uniform(8, 15)),
            "power cap": 100.0,
            "job change": float(rng.uniform(20, 50)),
        }.get(kind, math.inf)
        times = [begin]
        while what.apart_s and times[-1] + 1.5 * what.apart_s < self._seconds - 20:
            times.append(times[-1] + what.apart_s * float(rng.uniform(1, 1.5)))
        card = -1 if what.whole or kind in ("node silent",) else int(rng.integers(CARDS))
        model = int(rng.choice(len(MODELS), p=(0.5, 0.2, 0.3)))
        close = float(rng.uniform(-2, 2)) if rng.random() < 0.2 else float(rng.uniform(-0.05, 0.05))
        return _Host(
            number, model, Happening(kind, number, card, tuple(times), seconds),
            phase=float(rng.uniform(0, SWEEP_S)),
            error_s=close,
            busy=what.busy or bool(rng.random() < self._load),
            clock=[CLOCKS[model] * float(rng.normal(1, 0.006)) for _ in range(CARDS)],
            hot=[float(rng.normal(60 + place, 1.5)) for place in range(CARDS)],
        )  # fmt: skip

    # what is read

    def _live(self, host: _Host) -> None:
        """All sweeps of one host, from the beginning to the end of the stretch."""
        rng, what = self._rng, host.happening
        clock_off = float(rng.uniform(5, 90)) * float(rng.choice((-1, 1)))
        ready = -math.inf
        for number in range(int(self._seconds / SWEEP_S) + 1):
            at = number * SWEEP_S + host.phase + float(rng.uniform(-0.05, 0.05))
            on = what.on(at)
            if what.kind == "node silent" and on:
                break
            if what.kind in ("missed sweeps", "planned reboot", "agent restart") and on:
                if host.last is not None and what.kind != "missed sweeps":
                    self._event(host, what.times[0], "agent_stop")
                host.last = None if what.kind != "missed sweeps" else host.last
                continue
            if host.last is None and number and what.kind in ("planned reboot", "agent restart"):
                ready = self._come_back(host, at)
            if what.kind == "clock off" and on:
                host.offset_s = -clock_off
            received = at + float(rng.uniform(0.1, 0.8))
            if what.kind == "late batches" and on:
                begin = max(one for one in what.times if one <= at)
                received = max(received, begin + what.seconds + float(rng.uniform(0.1, 0.8)))
            self._sweep(host, at, received, error="driver_not_loaded" if at < ready else "")

    def _come_back(self, host: _Host, at: float) -> float:
        """The agent starts again; returns until when no driver answers."""
        ready = -math.inf
        if host.happening.kind == "planned reboot":
            before, host.boot_id = host.boot_id, "boot-2"
            host.booted = at - float(self._rng.uniform(10, 40))
            host.new_counters()
            ready = host.booted + float(self._rng.uniform(20, 110))
            self._event(host, at, "reboot", detail={"before": before, "now": host.boot_id})
        host.epoch, host.slow_at = 1, -1e9
        self._event(host, at, "agent_start", code="stopped")
        self._outbox.put(at + 0.1, "node", {"node": host.name, "boot_id": host.boot_id, "hello_at": when(at)})
        return ready

    def _event(
        self, host: _Host, at: float, kind: str, code: str = "", detail: Mapping[str, str] | None = None
    ) -> None:
        row = {
            "ts": when(at), "received_at": when(at + 0.2), "node": host.name, "boot_id": host.boot_id,
            "entity": "node:", "kind": kind, "code": code, "count": 1, "message": "",
            "detail": json.dumps(detail or {}),
        }  # fmt: skip
        self._outbox.put(at + 0.2, "event", row)

    def _sweep(self, host: _Host, at: float, received: float, error: str) -> None:
        kind, on = host.happening.kind, host.happening.on(at)
        if kind == "driver step":
            if on:
                error = "driver_not_loaded"
            elif at >= host.happening.times[0] and host.epoch == 1:
                host.epoch, host.driver, host.slower = 2, "590.10", 0.98
                host.new_counters()
        head: dict[str, object] = {
            "ts": when(at + (host.error_s if not host.offset_s else float(self._rng.uniform(0, 0.3)))),
            "received_at": when(received), "node": host.name, "boot_id": host.boot_id,
        }  # fmt: skip
        cards = [] if error else [row for card in range(CARDS) if (row := self._card(host, card, at))]
        behind = SWEEP_S if kind == "rows behind" and host.happening.began(host.last, at) else 0.0
        for row in cards:
            self._outbox.put(received + behind, "gpu", head | row)
        run: dict[str, object] = {"ok": not error, "error": error}
        self._outbox.put(received, "agent", head | run | {"probe": "gpu", "rows": len(cards)})
        self._outbox.put(received, "host", head | {"uptime_s": at - host.booted})
        host.sweeps.append((at, received))
        host.last = at
        if at - host.slow_at >= SLOW_S - 0.5:
            host.slow_at = at
            host.slow_sweeps.append((at, received))
            bus = [self._bus(host, card, at) for card in range(CARDS)]
            for row in bus:
                self._outbox.put(received, "pci", head | row)
            self._outbox.put(
                received, "agent", head | {"ok": True, "error": "", "probe": "pci", "rows": CARDS}
            )
            for row in cards:
                self._outbox.put(received, "gpu_health", head | self._health(host, row, at))
        host.sent += 1
        self._outbox.put(received, "ledger", {
            "node": host.name, "spool_id": "s", "number": host.sent, "digest": "d", "boot_id": host.boot_id,
            "received_at": when(received), "offset_s": host.offset_s, "lane": "live", "rows": 1,
        })  # fmt: skip

    def _card(self, host: _Host, card: int, at: float) -> dict[str, object] | None:
        """One row of `gpu`; None = the driver does not list it."""
        rng, what, kind = self._rng, host.happening, host.happening.kind
        happens = what.began(host.last, at) if kind in ONCE else what.on(at)
        on = happens and what.card in (card, -1)
        key: dict[str, object] = {
            "gpu_uuid": host.uuid(card), "gpu_index": card, "pci": _pci(card), "driver_epoch": host.epoch,
        }  # fmt: skip
        if on and kind == "card not listed":
            return None
        if on and kind in ("card lost", "all cards lost"):
            return key | {"state": "lost"}
        if on and kind in ("driver call hangs", "one hung read"):
            return key | {"state": "hung"}
        since = at - (host.last if host.last is not None else at)
        begin = max((one for one in what.times if one <= at), default=at)
        slowed = min(since, at - begin)
        busy = host.busy ^ (kind == "job change" and what.on(at))
        ratio, reasons, util = float(rng.normal(1, 0.003)), 0, float(rng.uniform(95, 100))
        if on and kind == "power brake":
            ratio, reasons = 0.5, 8 | 128
            host.brake_s[card] += slowed
        elif on and kind == "hardware thermal":
            ratio, reasons = 0.7, 8 | 64
            host.heat_s[card] += 0.6 * slowed
        elif on and kind == "clock pinned":
            ratio *= 0.8
        elif on and kind == "clocks set":
            ratio, reasons = ratio * 0.75, 2
        elif on and kind == "power cap":
            ratio, reasons = ratio * 0.85, 4
            host.cap_s[card] += slowed
        elif on and kind == "short heat":
            ratio, reasons = ratio * 0.85, 32
            host.soft_s[card] += slowed
        elif on and kind == "one blip":
            (host.brake_s if card % 2 else host.heat_s)[card] += 0.3
        if not busy:
            ratio, reasons, util = 345 / host.clock[card], 1, 0.0
        heat = host.hot[card] + float(rng.normal(0, 1)) if busy else 35 + float(rng.normal(0, 1))
        gen = (5, 5, 4)[host.model]
        return key | {
            "state": "ok", "util_pct": util, "sm_clock_mhz": host.clock[card] * ratio * host.slower,
            "power_w": (620 if busy else 75) * float(rng.normal(1, 0.01)) * (0.6 if ratio < 0.75 else 1),
            "power_limit_w": 700.0, "temperature_c": heat,
            "temperature_margin_c": None if host.model == 2 else 88 - heat,
            "mem_used_bytes": 70 * 2**30 if busy else 2**29, "mem_total_bytes": 80 * 2**30,
            "pstate": 0 if busy else 8, "clock_reasons": reasons, "hw_brake_s_total": host.brake_s[card],
            "hw_thermal_s_total": host.heat_s[card], "sw_thermal_s_total": host.soft_s[card],
            "power_cap_s_total": host.cap_s[card], "pcie_gen": gen if busy else 1, "pcie_gen_max": gen,
            "pcie_width": 16, "pcie_width_max": 16,
        }  # fmt: skip

    def _bus(self, host: _Host, card: int, at: float) -> dict[str, object]:
        what = host.happening
        gone = what.kind == "card off the bus" and what.on(at) and what.card == card
        gen = (5, 5, 4)[host.model]
        return {
            "pci": _pci(card), "device_kind": "gpu", "present": not gone, "runtime_status": "active",
            "path": f"0000:00:01.0/{_pci(card)}", "slowest": _pci(card), "narrowest": _pci(card),
            **dict.fromkeys(("pcie_gen", "pcie_gen_max", "path_gen", "path_gen_max"), gen),
            **dict.fromkeys(("pcie_width", "pcie_width_max", "path_width", "path_width_max"), 16),
        }  # fmt: skip

    def _health(self, host: _Host, row: Mapping[str, object], at: float) -> dict[str, object]:
        key = {name: row[name] for name in ("gpu_uuid", "gpu_index", "pci", "state", "driver_epoch")}
        if row["state"] != "ok":
            return key
        what = host.happening
        wrong = what.kind == "memory error" and what.on(at) and what.card == row["gpu_index"]
        return key | {
            "recovery_action": "none", "ecc_corrected_total": 0, "ecc_uncorrectable_total": int(wrong),
            "ecc_sram_threshold_exceeded": False, "remap_failed": False, "remap_pending": False,
            "memory_unrepairable": False, "remap_banks_none": 0, "power_limit_default_w": 700.0,
            "power_limit_requested_w": 700.0, "slowdown_margin_c": None if host.model == 2 else -2.0,
            "slowdown_temperature_c": 90.0 if host.model == 2 else None,
            "driver_version": host.driver, "library_version": host.driver,
        }  # fmt: skip

    # what is stored

    def _install(self) -> None:
        day = START - timedelta(days=1)
        probes = {name: SAMPLED[name].METRICS for name in ("gpu", "gpu_health", "pci", "host")}
        with self._store.transaction() as write:
            for probe, metrics in {**probes, "agent": agent.METRICS}.items():
                self._store.ensure_probe(write, probe, [
                    Column(m.name, m.type, str(m.unit), m.kind.name.lower(), m.help, m.low, m.high, m.rollup)
                    for m in metrics
                ])  # fmt: skip
            for host in self._hosts:
                model = MODELS[host.model].name
                write.execute(
                    "INSERT INTO live.node VALUES ($node, $node, $node, 'boot-1', 's', '1', '', $day, $day)",
                    {"node": host.name, "day": day},
                )
                write.execute(
                    "INSERT INTO live.inventory SELECT $node, 'node:', 'node', NULL, NULL, NULL, NULL, NULL, "
                    "NULL, '{}', $day, NULL",
                    {"node": host.name, "day": day},
                )
                write.execute(
                    "INSERT INTO live.probe SELECT $node, unnest(['gpu', 'host', 'pci', 'gpu_health']), "
                    "unnest([5, 5, 60, 60])",
                    {"node": host.name},
                )
                write.execute(
                    "INSERT INTO live.inventory SELECT $node, 'gpu:' || uuid, 'gpu', uuid, uuid, pci, "
                    "$model, NULL, card, '{}', $day, NULL "
                    "FROM (SELECT unnest($uuid) AS uuid, unnest($pci) AS pci, unnest($card) AS card)",
                    {
                        "node": host.name, "model": model, "day": day,
                        "uuid": [host.uuid(card) for card in range(CARDS)],
                        "pci": [_pci(card) for card in range(CARDS)], "card": list(range(CARDS)),
                    },
                )  # fmt: skip
                if host.number % 2:  # the other half is held against its peers
                    write.execute(
                        "INSERT INTO live.baseline SELECT $node, unnest($entity), 'sm_clock_busy_mhz', "
                        "unnest($clock), 1, 48, '580', 'frozen', 'collector', $day, ''",
                        {
                            "node": host.name, "day": day, "clock": host.clock,
                            "entity": [f"gpu:{host.uuid(card)}" for card in range(CARDS)],
                        },
                    )  # fmt: skip
            write.execute(
                "INSERT INTO live.expected SELECT node, uuid, serial, pci, model, slot, 'accepted', 'bench', "
                "$day, '' FROM live.inventory WHERE kind = 'gpu'",
                {"day": day},
            )
        with self._store.reader(LIVE) as read:
            self._types = {
                table: dict(
                    read.execute(
                        "SELECT column_name, data_type FROM duckdb_columns() "
                        "WHERE schema_name = 'live' AND table_name = ?",
                        [table],
                    ).fetchall()
                )
                for table in (*probes, "agent", "event", "ledger")
            }

    def _deliver(self, at: float) -> None:
        """Store what has been received by now."""
        with self._store.transaction() as write:
            for table, rows in self._outbox.due(at).items():
                if table == "node":
                    for row in rows:
                        write.execute(
                            "UPDATE live.node SET boot_id = $boot_id, hello_at = $hello_at "
                            "WHERE node = $node",
                            row,
                        )
                    continue
                names = list(dict.fromkeys(name for row in rows for name in row))
                cells = ", ".join(f"unnest(?::{self._types[table][name]}[])" for name in names)
                write.execute(
                    f"INSERT INTO live.{table} ({', '.join(names)}) SELECT {cells}",
                    [[row.get(name) for row in rows] for name in names],
                )

    # what it is worth

    def _score(self, fired: Sequence[tuple[float, Finding]], result: Result) -> None:
        judged_days = CARDS * (self._seconds - RUN_IN_S) / 86400
        for host in self._hosts:
            what, kind = host.happening, KINDS[host.happening.kind]
            mine = [(at, one) for at, one in fired if one.node == host.name]
            result.gpu_days += judged_days
            if what.kind == "nothing":
                result.calm_gpu_days += judged_days
            if what.kind in DISTURBANCES:
                result.met[what.kind] += sum(one < self._seconds for one in what.times)
            hits = []
            for at, one in mine:
                name = f"{one.rule}/{one.code}"
                true = any(name.startswith(said) for said in kind.explains) and at >= what.times[0]
                if true and one.entity.startswith("gpu:"):
                    true = what.card in (-1, int(one.entity.rsplit("-", 1)[1]))
                if not true:
                    result.false.append(
                        Unexplained(one.rule, one.code, one.node, one.entity, at, what.kind, self._number)
                    )
                    continue
                result.explained[what.kind, name] += 1
                hits.append(at)
            if kind.wanted:
                complete = not kind.whole or len(hits) == CARDS
                result.delays.append(self._delay(host, max(hits) if hits and complete else None))
        for at, one in fired:
            if not one.node or one.node.startswith("("):
                result.false.append(
                    Unexplained(one.rule, one.code, one.node, one.entity, at, "nothing", self._number)
                )

    def _delay(self, host: _Host, at: float | None) -> Delay:
        what, kind = host.happening, KINDS[host.happening.kind]
        if at is None:
            return Delay(what.kind, None, None, None)
        begin = what.times[0]
        if what.kind == "node silent":  # silent since it was last heard
            begin = max(received for _, received in host.sweeps)
        if not kind.samples:
            return Delay(what.kind, at - begin, None, None)
        read = host.slow_sweeps if kind.every_s == SLOW_S else host.sweeps
        received = sorted(got for taken, got in read if taken >= begin)
        enough = received[kind.samples - 1]
        return Delay(
            what.kind,
            at - begin,
            sum(got <= at for got in received),
            math.ceil((at - enough) / kind.rule_s),
        )


def _pci(card: int) -> str:
    return f"0000:{card + 16:02x}:00.0"


def together(results: Iterable[Result]) -> Result:
    """One result of many."""
    total = Result()
    for one in results:
        total.add(one)
    return total
