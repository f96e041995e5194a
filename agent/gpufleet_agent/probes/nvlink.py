"""The links between cards: which are up, and what they count. Table `nvlink`.

One row per card and sweep (`link` is NULL) with the sums of its links; a row of a single link when it changed or
counted an error, and of every link once an hour. What was sent is remembered in this process alone: one that is
started again sends all anew.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from gpufleet.metric import Cell, Kind, Metric, Null, Reason, Row, Type, Unit
from gpufleet_agent.drivers import Gpu, Host, Hung, Lost

EVERY = 30.0

_F, _I, _U, _S = Type.F64, Type.I64, Type.U64, Type.STRING
_G, _C, _ST = Kind.GAUGE, Kind.COUNTER, Kind.STATE

METRICS = (
    Metric("gpu_uuid", _S, Unit.TEXT, Kind.KEY, "Identity of the card (nvidia-smi: uuid)."),
    Metric("gpu_index", _I, Unit.ONE, Kind.KEY, "The driver's number today; never an identity.", 0, 1023),
    Metric("pci", _S, Unit.TEXT, Kind.KEY, "PCI address dddd:bb:dd.f (nvidia-smi: pci.bus_id)."),
    Metric("link", _I, Unit.ONE, Kind.KEY, "Number of the link (nvidia-smi nvlink -s); NULL in the row of the card.", 0, 62),
    Metric("state", _S, Unit.TEXT, _ST, "Of the card: ok, lost (no longer answers) or hung (a call passed its deadline).", rollup="last"),
    Metric("links", _U, Unit.COUNT, _ST, "Links the card has, connected or not.", 0, 63, "last"),
    Metric("links_active", _U, Unit.COUNT, _G, "Links that are up (nvidia-smi nvlink -s); NULL unless every one could be read.", 0, 63, "min"),
    Metric("links_up", _U, Unit.BITS, _ST, "Which links are up, link 0 the lowest bit.", 0, 2**63 - 1, "last"),
    Metric("links_most", _U, Unit.COUNT, _ST, "Most links up at once since the agent began to look.", 0, 63, "max"),
    Metric("link_state", _S, Unit.TEXT, _ST, "Of one link: active, sleep (saves power), no_traffic (trained but closed) or inactive.", rollup="last"),
    Metric("version", _S, Unit.TEXT, _ST, "Generation of the link: 3.0 Ampere, 4.0 Hopper, 5.0 Blackwell.", rollup="last"),
    Metric("remote_kind", _S, Unit.TEXT, _ST, "Other end of one link: gpu, switch or cpu.", rollup="last"),
    Metric("remote_pci", _S, Unit.TEXT, _ST, "PCI address of the other end of one link (nvidia-smi nvlink -R).", rollup="last"),
    Metric("speed_gb_per_s", _F, Unit.GB_PER_S, _ST, "Raw rate in one direction (nvidia-smi nvlink -s); of the card: of all its links that are up.", 0, 1e4, "min"),
    Metric("crc_errors_total", _U, Unit.COUNT, _C, "Packets with a wrong checksum; up to Hopper (nvidia-smi nvlink -e).", rollup="delta"),
    Metric("replays_total", _U, Unit.COUNT, _C, "Packets sent again; up to Hopper (nvidia-smi nvlink -e).", rollup="delta"),
    Metric("recoveries_total", _U, Unit.COUNT, _C, "Times a link trained anew for errors (nvidia-smi nvlink -e).", rollup="delta"),
    Metric("recoveries_failed_total", _U, Unit.COUNT, _C, "Times that did not bring the link back; Blackwell and newer.", rollup="delta"),
    Metric("ecc_errors_total", _U, Unit.COUNT, _C, "Data errors that the link's ECC saw; Ampere and Hopper.", rollup="delta"),
    Metric("effective_errors_total", _U, Unit.COUNT, _C, "Errors left after correction; Blackwell and newer.", rollup="delta"),
    Metric("rx_errors_total", _U, Unit.COUNT, _C, "Packets received with errors; Blackwell and newer.", rollup="delta"),
    Metric("malformed_total", _U, Unit.COUNT, _C, "Packets received that are none; Blackwell and newer.", rollup="delta"),
    Metric("overruns_total", _U, Unit.COUNT, _C, "Packets for which there was no buffer; Blackwell and newer.", rollup="delta"),
    Metric("discards_total", _U, Unit.COUNT, _C, "Packets that could not be sent; Blackwell and newer.", rollup="delta"),
    Metric("effective_ber", _F, Unit.ONE, _G, "Bit error rate after correction, of the worst link; Blackwell and newer.", 0, 1, "max"),
    Metric("tx_bytes_total", _U, Unit.BYTE, _C, "Data sent, without protocol up to Hopper (nvidia-smi nvlink -gt d).", rollup="delta"),
    Metric("rx_bytes_total", _U, Unit.BYTE, _C, "Data received, without protocol up to Hopper (nvidia-smi nvlink -gt d).", rollup="delta"),
    Metric("driver_epoch", _U, Unit.COUNT, _ST, "Counts the driver's initialisations; cumulative counters start anew with it.", 0, 2**31, "last"),
)  # fmt: skip

UP = ("active", "sleep")
"""States of a link that carries traffic or could at once."""

_WHOLE_S = 3600.0
_COUNTERS = tuple(metric.name for metric in METRICS if metric.kind is _C)
_ERRORS = tuple(name for name in _COUNTERS if not name.endswith("_bytes_total"))
_TOLD = ("link_state", "version", "remote_kind", "remote_pci", "speed_gb_per_s", *_ERRORS)
"""What of a link is news: neither traffic nor a rate that is never the same twice."""

_ABSENT = Null(Reason.NOT_SUPPORTED)
_BLANK: Mapping[str, Cell] = {metric.name: _ABSENT for metric in METRICS}

_clock = time.monotonic


@dataclass(slots=True)
class Memory:
    """What is remembered of one card.

    Attributes:
        links: Most links it had.
        most: Most links up at once.
        version: Generation, once one was told.
        epoch: Of the driver, for what follows.
        whole_at: When all links were last sent.
        sent: What was last sent of each link.
        counted: Last known counts of each link: one that is down for now does not take its counts along.
    """

    links: int = 0
    most: int = 0
    version: str = ""
    epoch: int = 0
    whole_at: float = -_WHOLE_S
    sent: dict[int, tuple[Cell, ...]] = field(default_factory=dict)
    counted: dict[str, dict[int, int]] = field(default_factory=dict)

    def forget(self, epoch: int) -> None:
        """Another start of the driver, or a card that came back: all is news, and counts begin anew."""
        self.epoch, self.whole_at = epoch, -_WHOLE_S
        self.sent.clear()
        self.counted.clear()

    def learn(self, links: Sequence[Row] | Null) -> None:
        """Take note of the best that the card has shown. It is never taken back: links train for minutes."""
        if isinstance(links, Null):
            return
        self.links = max(self.links, len(links))
        self.most = max(self.most, sum(link.get("link_state") in UP for link in links))
        told = (link.get("version") for link in links)
        self.version = next((version for version in told if isinstance(version, str)), self.version)


_memories: WeakKeyDictionary[Host, dict[str, Memory]] = WeakKeyDictionary()


def read(host: Host, /) -> Iterable[Row]:
    """One row per card the driver knows, after those of its links that have news.

    Raises:
        DriverGone: Cards are on the bus but no driver answers.
    """
    for gpu in host.gpus():
        memory = _memory(host, gpu)
        if memory.epoch != host.epoch:
            memory.forget(host.epoch)
        rows: list[dict[str, Cell]]
        state = "ok"
        try:
            rows = _read(memory, gpu.links())
        except (Lost, Hung) as trouble:
            state = "lost" if isinstance(trouble, Lost) else "hung"
            memory.forget(host.epoch)
            rows = [dict.fromkeys(_BLANK, Null(Reason.FAILED, trouble.code))]
        for row in rows:
            row |= {
                "gpu_uuid": gpu.uuid or Null(Reason.NOT_READ),
                "gpu_index": gpu.index,
                "pci": gpu.pci,
                "state": state,
                "links_most": memory.most if memory.links else _ABSENT,
                "driver_epoch": host.epoch,
            }
            yield row


def attributes(host: Host, gpu: Gpu) -> Mapping[str, str]:
    """The card's links for the inventory: how many it has, the most it had up since the agent began, their kind.

    Raises:
        Lost, Hung: The card was never read and does not answer.
    """
    memory = _memory(host, gpu)
    if not memory.epoch:
        memory.learn(gpu.links())
    if not memory.links:
        return {}
    found = {"nvlinks": str(memory.links), "nvlinks_active": str(memory.most)}
    return found | ({"nvlink_version": memory.version} if memory.version else {})


def _memory(host: Host, gpu: Gpu) -> Memory:
    return _memories.setdefault(host, {}).setdefault(gpu.uuid or gpu.pci, Memory())


def _read(memory: Memory, links: Sequence[Row] | Null) -> list[dict[str, Cell]]:
    """The rows of links that have news, then that of the card: for what stands in both, the last one counts."""
    memory.learn(links)
    if isinstance(links, Null) or not links:
        return [dict.fromkeys(_BLANK, links if isinstance(links, Null) else _ABSENT)]
    whole = _clock() - memory.whole_at >= _WHOLE_S
    if whole:
        memory.whole_at = _clock()
    rows: list[dict[str, Cell]] = []
    for link in links:
        number = link["link"]
        if not isinstance(number, int):
            continue
        told = tuple(link.get(name, _ABSENT) for name in _TOLD)
        for name in _COUNTERS:
            count = link.get(name)
            if isinstance(count, int):
                memory.counted.setdefault(name, {})[number] = count
        if whole or memory.sent.get(number) != told:
            memory.sent[number] = told
            rows.append({**_BLANK, **link})
    return [*rows, _card(memory, links)]


def _card(memory: Memory, links: Sequence[Row]) -> dict[str, Cell]:
    """What a card shows: its links together."""
    unread = next((state for link in links if isinstance(state := link["link_state"], Null)), None)
    up = [link for link in links if link["link_state"] in UP]
    row: dict[str, Cell] = {
        **_BLANK,
        "links": memory.links,
        "links_active": unread or len(up),
        "links_up": unread or sum(1 << int(number) for link in up if isinstance(number := link["link"], int)),
        "version": memory.version or _ABSENT,
    }
    for name in _COUNTERS:
        cells = [link.get(name, _ABSENT) for link in links]
        told = any(isinstance(cell, int) for cell in cells)
        row[name] = sum(memory.counted[name].values()) if told else _first(links, name)
    rates, worst = _numbers(up, "speed_gb_per_s"), _numbers(links, "effective_ber")
    row["speed_gb_per_s"] = sum(rates) if rates else _first(links, "speed_gb_per_s")
    row["effective_ber"] = max(worst) if worst else _first(links, "effective_ber")
    return row


def _numbers(links: Sequence[Row], name: str) -> list[float]:
    return [float(cell) for link in links if isinstance(cell := link.get(name), int | float)]


def _first(links: Sequence[Row], name: str) -> Cell:
    """Why there is no value."""
    cell = links[0].get(name, _ABSENT)
    return cell if isinstance(cell, Null) else _ABSENT
