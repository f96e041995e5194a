"""`fleet-agent scan`: look at this host once and print what is there. No collector, no state, no gRPC.

The looking is done by the sampler program, so that a hung driver is named instead of hanging the terminal.
"""

import contextlib
import os
import re
import select
import subprocess
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from gpufleet.metric import Kind, Metric, Reason, Unit, Value
from gpufleet_agent.child import module_command
from gpufleet_agent.guard import HostSettings
from gpufleet_agent.pipe import Frames, Inventory, PipeError
from gpufleet_agent.probe import Sweep
from gpufleet_agent.probes import PROBES
from gpufleet_agent.progress import INIT_CALL, Doing, ProgressView, new_memory
from gpufleet_agent.sampler import Settings

Reading = dict[str, Value | None]


@dataclass(slots=True)
class Seen:
    """What one look gave.

    Attributes:
        inventory: What the host is made of; None when it could not be read.
        sweeps: One per probe that ended.
        hung: The driver call that did not return; None = all did.
    """

    inventory: Inventory | None = None
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    hung: Doing | None = None


def look(
    host: HostSettings,
    deadline_s: float = 3.0,
    command: Sequence[str] = module_command("gpufleet_agent.sampler"),
    init_deadline_s: float = 60.0,
) -> Seen:
    """Run each probe once. A driver call past its deadline ends the look; what came before it is kept."""
    memory = new_memory()
    settings = Settings(
        host=host, probes={name: probe.EVERY for name, probe in PROBES.items()}, progress_fd=memory, once=True
    )
    child = subprocess.Popen(
        [*command, msgspec.json.encode(settings).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(memory,),
        bufsize=0,
    )
    view = ProgressView(memory)
    os.close(memory)
    try:
        return _hear(child, view, deadline_s, init_deadline_s)
    finally:
        for end in (child.stdin, child.stdout):
            if end is not None:
                end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.2)
        if child.returncode is None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)


def _hear(
    child: subprocess.Popen[bytes], view: ProgressView, deadline_s: float, init_deadline_s: float
) -> Seen:
    seen = Seen()
    frames = Frames()
    assert child.stdout is not None
    began = time.monotonic()
    while True:
        ready, _, _ = select.select([child.stdout], [], [], 0.2)
        if ready:
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                return seen
            with contextlib.suppress(PipeError):
                for message in frames.feed(data):
                    if isinstance(message, Sweep):
                        seen.sweeps[message.probe] = message
                    elif isinstance(message, Inventory):
                        seen.inventory = message
            continue
        now = time.monotonic()
        doing = view.call()
        if doing is None and now - began > 10 * deadline_s:
            doing = view.phase()
        initialising = doing is not None and doing.call == INIT_CALL
        if doing is not None and now - doing.since > (init_deadline_s if initialising else deadline_s):
            seen.hung = doing
            return seen


def document(seen: Seen, now: datetime | None = None) -> dict[str, object]:
    """The look as a JSON document: the host, its cards, its bus, then whatever else the probes found."""
    items: dict[str, dict[str, object]] = {
        item.entity: {"entity": item.entity, "attributes": dict(item.attributes)}
        for item in (seen.inventory.items if seen.inventory else ())
    }
    node = items.setdefault("node:", {"entity": "node:", "attributes": {}})
    node["errors"] = {name: sweep.error for name, sweep in seen.sweeps.items() if sweep.error}
    node["unseen"] = {
        name: unseen
        for name, sweep in seen.sweeps.items()
        if (unseen := _unseen(PROBES[name].METRICS, sweep))
    }
    if seen.hung is not None:
        node["hung"] = {"pci": seen.hung.card, "call": seen.hung.call}
    for entity, probe, reading in _readings(seen):
        items.setdefault(entity, {"entity": entity, "attributes": {}})[probe] = reading
    return {
        "api_version": "fleet/v1",
        "kind": "Scan",
        "generated_at": (now or datetime.now(UTC)).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "items": sorted(items.values(), key=_order),
    }


def _readings(seen: Seen) -> list[tuple[str, str, Reading]]:
    """(entity, probe, its cells) of every row."""
    found: list[tuple[str, str, Reading]] = []
    for name, sweep in seen.sweeps.items():
        metrics = PROBES[name].METRICS
        for cells in sweep.rows:
            reading = {metric.name: cell for metric, cell in zip(metrics, cells, strict=True)}
            found.append((_entity(name, metrics, reading), name, reading))
    return found


def _entity(probe: str, metrics: Sequence[Metric], row: Reading) -> str:
    """What a row is about: its card, its place on the bus, a thing by the keys of its probe, or the host."""
    keys = [metric.name for metric in metrics if metric.kind is Kind.KEY]
    own = [key for key in keys if key not in ("gpu_uuid", "gpu_index", "pci")]
    if not keys:
        return "node:"
    if own:
        card = [str(row["gpu_uuid"])] if row.get("gpu_uuid") else []
        return f"{probe}:{'/'.join([*card, *(str(row[key]) for key in own)])}"
    return f"gpu:{row['gpu_uuid']}" if row.get("gpu_uuid") and "gpu_uuid" in keys else f"pci:{row['pci']}"


def _unseen(metrics: Sequence[Metric], sweep: Sweep) -> dict[str, str]:
    """Columns that have no value in any row, and why: the reason in the first row."""
    found: dict[str, str] = {}
    for cells, reasons in zip(sweep.rows, sweep.reasons, strict=True):
        why = iter(reasons)
        nulls = {
            metric.name: Reason(next(why)).name.lower()
            for metric, cell in zip(metrics, cells, strict=True)
            if cell is None
        }
        found = {name: reason for name, reason in (found or nulls).items() if name in nulls}
        if not found:
            break
    return found


def _order(item: dict[str, object]) -> tuple[int, str]:
    entity = str(item["entity"])
    kinds = ("node", "gpu", "pci")
    kind = entity.partition(":")[0]
    return kinds.index(kind) if kind in kinds else len(kinds), entity


_NODE_LINES = (
    ("hostname", "host"),
    ("machine_id", "machine id"),
    ("kernel", "kernel"),
    ("os", "system"),
    ("cpu_model", "cpu"),
    ("driver", "driver"),
)


def table(seen: Seen) -> str:
    """The look for people."""
    attributes = next(
        (
            item.attributes
            for item in (seen.inventory.items if seen.inventory else ())
            if item.entity == "node:"
        ),
        {},
    )
    rows = {name: [reading for _, probe, reading in _readings(seen) if probe == name] for name in PROBES}
    lines = [f"{label:<12}{attributes[key]}" for key, label in _NODE_LINES if attributes.get(key)]
    for host in rows.get("host", []):
        lines += _host_lines(host)
    lines += _card_lines(seen, rows.get("gpu", []))
    devices = rows.get("pci", [])
    lines.append(f"{'bus':<12}{len(devices)} GPUs, NVSwitches and HCAs" if devices else f"{'bus':<12}no GPUs")
    for device in devices:
        ids = f"{device['vendor_id']}:{device['device_id']}"
        bound = device["bound_driver"] or "no driver"
        gone = "" if device["present"] else "  does not answer on the bus"
        lines.append(f"  {device['pci']}  {device['device_kind']:<9} {ids}  {bound}{gone}")
    for name, probe in PROBES.items():
        if name not in _OWN_LINES:
            lines += _probe_lines(name, probe.METRICS, seen.sweeps.get(name))
    lines += _unseen_lines(seen)
    return "\n".join(lines)


_OWN_LINES = ("gpu", "gpu_health", "pci", "host")
_MOST_LINES = 32
_WIDTH = 110
_REASONS = {"not_supported": "not supported", "no_permission": "no permission", "failed": "failed"}


def _probe_lines(name: str, metrics: Sequence[Metric], sweep: Sweep | None) -> list[str]:
    """Any probe's rows: the keys, and what is or has a state; counters are for machines."""
    if sweep is None:
        return [f"{name:<12}could not be looked for"]
    if sweep.error:
        return [f"{name:<12}cannot be read: {sweep.error}"]
    lines = [f"{name:<12}{len(sweep.rows) or 'none'}"]
    for cells in sweep.rows[:_MOST_LINES]:
        pairs = list(zip(metrics, cells, strict=True))
        keys = [str(cell) for metric, cell in pairs if metric.kind is Kind.KEY and cell not in (None, "")]
        told = [
            said
            for metric, cell in pairs
            if metric.kind in (Kind.STATE, Kind.GAUGE) and (said := _told(metric, cell))
        ]
        text = f"{' '.join(keys)}  {', '.join(told)}".strip()
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
    if len(sweep.rows) > _MOST_LINES:
        lines.append(f"  and {len(sweep.rows) - _MOST_LINES} more")
    return lines


_SIZES = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))


def _told(metric: Metric, cell: Value | None) -> str:
    """A value with its name and unit; empty for one that says nothing."""
    if cell is None or cell == "":
        return ""
    name = re.sub(r"_(bytes|pct|mhz|c|w|s)$", "", metric.name).replace("_", " ")
    if isinstance(cell, bool):
        return name if cell else ""
    if isinstance(cell, str):
        return f"{name} {cell}"
    if metric.unit is Unit.BYTE:
        power, unit = next((at for at in _SIZES if cell >= 2 ** at[0]), (0, "B"))
        return f"{name} {cell / 2**power:.4g} {unit}"
    unit = "" if metric.unit in (Unit.TEXT, Unit.ONE, Unit.COUNT, Unit.BITS) else f" {metric.unit}"
    return f"{name} {cell:.4g}{unit}" if isinstance(cell, float) else f"{name} {cell}{unit}"


def _unseen_lines(seen: Seen) -> list[str]:
    """What this host does not let itself be asked, by reason; a family of columns as `family_*`."""
    lines: list[str] = []
    for reason, words in _REASONS.items():
        for name in PROBES:
            sweep = seen.sweeps.get(name)
            metrics = PROBES[name].METRICS
            unseen = _unseen(metrics, sweep) if sweep else {}
            columns = [column for column, why in unseen.items() if why == reason]
            if columns:
                text = (
                    f"{words}: {name}: {', '.join(_families(columns, [metric.name for metric in metrics]))}"
                )
                lines += textwrap.wrap(text, _WIDTH, subsequent_indent=" " * 4)
    return lines


def _families(columns: Sequence[str], every: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for column in columns:
        family = f"{column.partition('_')[0]}_"
        members = [name for name in every if name.startswith(family)]
        whole = len(members) > 2 and all(name in columns for name in members)
        found[f"{family}*" if whole else column] = None
    return list(found)


def _host_lines(host: Reading) -> list[str]:
    lines = []
    cores, load = host["cpus"], host["load1"]
    if isinstance(cores, int):
        lines.append(f"{'cores':<12}{cores}" + (f", load {load:g}" if isinstance(load, float) else ""))
    total, free = host["mem_total_bytes"], host["mem_available_bytes"]
    if isinstance(total, int) and isinstance(free, int):
        lines.append(f"{'memory':<12}{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB available")
    up = host["uptime_s"]
    if isinstance(up, int | float):
        days, rest = divmod(int(up), 86400)
        lines.append(f"{'uptime':<12}{days} d {rest // 3600} h {rest % 3600 // 60} min")
    waited = {name: host[f"psi_{name}_s_total"] for name in ("cpu_some", "memory_full", "io_some", "io_full")}
    told = [f"{name.replace('_', ' ')} {s:.1f} s" for name, s in waited.items() if isinstance(s, float)]
    if told:
        lines.append(f"{'pressure':<12}{', '.join(told)} since boot")
    return lines


def _card_lines(seen: Seen, cards: list[Reading]) -> list[str]:
    if seen.hung is not None:
        where = f" of {seen.hung.card}" if seen.hung.card else ""
        return [f"{'cards':<12}the driver hangs: {seen.hung.call}{where} has not returned"]
    sweep = seen.sweeps.get("gpu")
    if sweep is None:
        return [f"{'cards':<12}could not be looked for"]
    if sweep.error:
        return [f"{'cards':<12}cannot be read: {sweep.error}"]
    lines = [f"{'cards':<12}{len(cards) or 'none'}"]
    for card in cards:
        lines.append(
            f"  {card['gpu_index']}  {card['pci']}  {card['gpu_uuid'] or '-'}  {card['state']}"
            f"{_shown(card, 'temperature_c', 'C')}{_shown(card, 'power_w', 'W')}"
            f"{_shown(card, 'sm_clock_mhz', 'MHz')}{_shown(card, 'util_pct', '%')}"
        )
    return lines


def _shown(row: Reading, name: str, unit: str) -> str:
    value = row[name]
    return f"  {value:.0f} {unit}" if isinstance(value, int | float) else ""
