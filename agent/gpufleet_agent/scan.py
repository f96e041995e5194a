"""`fleet-agent scan`: look at this host once and print what is there. No collector, no state, no gRPC.

The looking is done by the sampler program, so that a hung driver is named instead of hanging the terminal.
"""

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from gpufleet.metric import Metric, Value
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
    """The look as a JSON document: the host, then its cards, then the rest of its bus."""
    items: dict[str, dict[str, object]] = {
        item.entity: {"entity": item.entity, "attributes": dict(item.attributes)}
        for item in (seen.inventory.items if seen.inventory else ())
    }
    node = items.setdefault("node:", {"entity": "node:", "attributes": {}})
    node["errors"] = {name: sweep.error for name, sweep in seen.sweeps.items() if sweep.error}
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
        metrics: tuple[Metric, ...] = PROBES[name].METRICS
        for cells in sweep.rows:
            reading = {metric.name: cell for metric, cell in zip(metrics, cells, strict=True)}
            found.append((_entity(reading), name, reading))
    return found


def _entity(row: Reading) -> str:
    """What a row is about: its card, its place on the bus, else the host."""
    if row.get("gpu_uuid") and "device_kind" not in row:
        return f"gpu:{row['gpu_uuid']}"
    return f"pci:{row['pci']}" if "pci" in row else "node:"


def _order(item: dict[str, object]) -> tuple[int, str]:
    entity = str(item["entity"])
    return ("node", "gpu", "pci").index(entity.partition(":")[0]), entity


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
    return "\n".join(lines)


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
