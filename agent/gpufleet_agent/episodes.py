"""What is going on with the cards over time: which are hung, which are lost. Kept in the spool's file.

An episode gives one event when it begins and one when it ends, also when the agent is restarted in between.
The supervisor asks here what to skip and when to try again.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from gpufleet.event import Event
from gpufleet.metric import Value
from gpufleet_agent.config import backoff
from gpufleet_agent.pipe import Inventory, Skip
from gpufleet_agent.probe import Sweep, mono_us, wall_us
from gpufleet_agent.probes import gpu
from gpufleet_agent.probes import pci as bus

_COLUMNS = {metric.name: at for at, metric in enumerate(gpu.METRICS)}
_PCI, _PRESENT = ([metric.name for metric in bus.METRICS].index(name) for name in ("pci", "present"))
_DOUBT_US = 10_000_000
"""A driver may answer from memory for so long for a card that the kernel already calls lost."""

_LIVE = ("temperature_c", "mem_clock_mhz", "pstate", "clock_reasons", "power_limit_w", "mem_util_pct")
"""Columns that are read from the card for the very row: identity and sizes a driver knows by heart."""

_MOST = 256
"""Episodes kept of each sort; a host has at most sixteen cards, but they are swapped over the years."""


def happened(
    kind: str,
    entity: str,
    message: str,
    code: str = "",
    detail: Mapping[str, Value | None] | None = None,
    count: int = 1,
) -> Event:
    """An event of this moment."""
    text = json.dumps(detail) if detail else ""
    return Event(kind, entity, wall_us(), mono_us(), code, message, text, count)


class Hang(msgspec.Struct):
    """Something that is not touched because a call to it did not return, or killed the process.

    Attributes:
        what: What is skipped: a PCI address, "" = the whole driver, "probe <name>" = a probe.
        boot_id: Of the boot in which it began; after a reboot it is tried afresh.
        call: The call that did not return.
        pci: The card the call was for; "" = none in particular.
        uuid: Of that card, where known.
        index: Of that card; -1 = unknown.
        since_us: CLOCK_BOOTTIME at its beginning.
        tries: How often it was tried again.
        next_try_us: CLOCK_BOOTTIME before which it is left alone.
        orphan: Process that may still be stuck in the call; 0 = none.
        orphan_born: Its start time in /proc: a later process of the same number is another one.
    """

    what: str
    boot_id: str
    call: str
    pci: str
    uuid: str
    index: int
    since_us: int
    tries: int = 0
    next_try_us: int = 0
    orphan: int = 0
    orphan_born: str = ""


class LostCard(msgspec.Struct, frozen=True):
    """A card that does not answer.

    Attributes:
        uuid: Its identity; empty where it is not known.
        pci: Its address.
        heard_us: CLOCK_BOOTTIME of the kernel's word that it is gone, while no driver has said so; else 0.
    """

    uuid: str
    pci: str
    heard_us: int = 0


class Kept(msgspec.Struct):
    """What is kept over a restart."""

    hung: list[Hang] = []
    lost: list[LostCard] = []
    mismatch: bool = False
    released_until_us: int = 0
    released_boot: str = ""


class Card(msgspec.Struct, frozen=True):
    """What is remembered of a card that was read."""

    uuid: str
    pci: str
    index: int


class Episodes:
    """The open episodes of one host.

    Args:
        boot_id: Of the running boot.
        text: What `save` was given last; anything unreadable counts as nothing.
        save: Keeps a text over restarts.
        retry_s: First wait before something hung is tried again; doubles.
        retry_max_s: Longest wait.
        clock_us: CLOCK_BOOTTIME, microseconds.
    """

    def __init__(
        self,
        boot_id: str,
        text: str | None,
        save: Callable[[str], None],
        retry_s: float = 60.0,
        retry_max_s: float = 3600.0,
        clock_us: Callable[[], int] = mono_us,
    ) -> None:
        self._boot_id = boot_id
        self._save = save
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._clock_us = clock_us
        kept = Kept()
        with contextlib.suppress(msgspec.DecodeError):  # of another version: at worst an event comes twice
            kept = msgspec.json.decode(text or "{}", type=Kept)
        self._hung = {hang.what: hang for hang in kept.hung[-_MOST:]}
        self._lost = {card.uuid or card.pci: card for card in kept.lost[-_MOST:]}
        self._mismatch = kept.mismatch
        self._released_until_us = kept.released_until_us if kept.released_boot == boot_id else 0
        self._versions: dict[str, str] = {}
        self._cards: dict[str, Card] = {}
        self._by_uuid: dict[str, Card] = {}
        self._serials: dict[str, str] = {}
        self._known: set[str] | None = None
        self._answered: set[str] = set()
        self._epoch: int | None = None
        self._on_bus: set[Value | None] = set()
        self._looked_for: dict[str, tuple[int, int]] = {}
        self.states: dict[str, str] = {}
        """State of each card in the newest sweep, by uuid or address."""
        for hang in self._hung.values():  # a restart is a good moment to try again, but not to hammer
            hang.next_try_us = min(hang.next_try_us, self._clock_us() + int(retry_s * 1e6))

    # ---- hung

    def begin_hang(self, what: str, pci: str, call: str, seconds: float) -> Event | None:
        """A call did not return: skip `what` from now on. The event, unless this is already known."""
        text = f"{call or 'a driver call'}{f' of {pci}' if pci else ''} has not returned for {seconds:.1f} s"
        detail: dict[str, Value | None] = {"pci": pci, "call": call, "seconds": round(seconds, 3)}
        return self._begin("driver_hung", what, pci, call, text, detail)

    def begin_crash(self, what: str, pci: str, call: str, signal: int) -> Event | None:
        """A call killed the process again: skip `what` from now on."""
        text = f"{call or 'a driver call'}{f' of {pci}' if pci else ''} kills its process: left alone"
        return self._begin(
            "driver_crashed", what, pci, call, text, {"pci": pci, "call": call, "signal": signal}
        )

    def _begin(
        self, kind: str, what: str, pci: str, call: str, text: str, detail: Mapping[str, Value | None]
    ) -> Event | None:
        known = self._hung.get(what)
        if known is not None and known.boot_id == self._boot_id:
            return None
        card = self._cards.get(pci)
        now = self._clock_us()
        self._hung[what] = Hang(
            what,
            self._boot_id,
            call,
            pci,
            card.uuid if card else "",
            card.index if card else -1,
            now,
            0,
            now + int(self._retry_s * 1e6),
        )
        self._keep()
        return happened(kind, self.entity(pci), text, call, detail)

    def postpone(self, what: str) -> None:
        """Tried again in vain: leave it alone for twice as long."""
        hang = self._hung.get(what)
        if what in self._looked_for:
            tries = self._looked_for[what][0] + 1
            wait_s = backoff(tries, self._retry_s, self._retry_max_s)
            self._looked_for[what] = (tries, self._clock_us() + int(wait_s * 1e6))
        if hang is not None:
            hang.tries += 1
            hang.next_try_us = self._clock_us() + int(
                backoff(hang.tries, self._retry_s, self._retry_max_s) * 1e6
            )
            self._keep()

    def end_hang(self, what: str) -> Event | None:
        """It answers again."""
        hang = self._hung.pop(what, None)
        if hang is None:
            return None
        self._keep()
        seconds = (self._clock_us() - hang.since_us) / 1e6 if hang.boot_id == self._boot_id else None
        subject = hang.pci or "the driver"
        return happened(
            "driver_recovered",
            self.entity(hang.pci),
            f"{subject} answers again",
            hang.call,
            {"pci": hang.pci, "seconds": seconds},
        )

    def is_hung(self, what: str) -> bool:
        """Whether it is to be skipped in this boot."""
        hang = self._hung.get(what)
        return hang is not None and hang.boot_id == self._boot_id

    def skips(self) -> list[Hang]:
        """Everything to be skipped in this boot."""
        return [hang for hang in self._hung.values() if hang.boot_id == self._boot_id]

    def due(self) -> list[Hang]:
        """What may be tried again now: its wait is over and no earlier process is stuck in it."""
        now = self._clock_us()
        return [hang for hang in self.skips() if hang.next_try_us <= now and not _alive(hang)]

    def set_orphan(self, what: str, pid: int) -> None:
        """Remember the process that may be stuck in the call; 0 = it is gone."""
        hang = self._hung.get(what)
        if hang is not None and hang.orphan != pid:
            hang.orphan, hang.orphan_born = pid, _born(pid)
            self._keep()

    # ---- the driver as a whole

    def begin_mismatch(self) -> Event | None:
        """Driver and library differ, also for a process started anew. The event, unless already known."""
        if self._mismatch:
            return None
        self._mismatch = True
        self._keep()
        versions = ", ".join(f"{name} {version}" for name, version in self._versions.items())
        text = f"driver and library differ in version{f' ({versions})' if versions else ''}: reload or reboot"
        return happened("driver_mismatch", "node:", text, "driver_mismatch", self._versions)

    def end_mismatch(self) -> Event | None:
        """The library answers again."""
        if not self._mismatch:
            return None
        self._mismatch = False
        self._keep()
        return happened("driver_recovered", "node:", "driver and library fit again", "driver_mismatch")

    @property
    def released(self) -> bool:
        """Whether people asked for the driver to be left alone now."""
        return self._clock_us() < self._released_until_us

    @property
    def released_for_s(self) -> float:
        """How much longer; 0 when not at all."""
        return max(0, self._released_until_us - self._clock_us()) / 1e6

    def release(self, for_s: float) -> None:
        """Leave the driver alone for so long, also over a restart of the agent; 0 = no longer."""
        self._released_until_us = self._clock_us() + int(for_s * 1e6) if for_s else 0
        self._keep()

    def skip_list(self) -> list[Skip]:
        """What children must not touch now."""
        skips = [skip_of(hang) for hang in self.skips() if not hang.what.startswith("probe ")]
        return [*skips, Skip("", why="released")] if self.released else skips

    # ---- lost and found

    def new_process(self) -> None:
        """The sampler was started anew: its driver counts its epochs from the beginning."""
        self._epoch = None

    def see_gpus(self, sweep: Sweep) -> list[Event]:
        """What changed with this sweep of probe `gpu`."""
        if sweep.error:
            return []
        before = (dict(self._lost), set(self._hung))
        events: list[Event] = []
        self.states = {}
        for row in sweep.rows:
            card = Card(_text(row, "gpu_uuid"), _text(row, "pci"), _number(row, "gpu_index"))
            state = _text(row, "state")
            if card.uuid:
                self._cards[card.pci] = self._by_uuid[card.uuid] = card
            self.states[card.uuid or card.pci] = state
            if state == "ok" and self._is_lost(card) and not _is_live(row):
                continue  # it gave a handle and not one value: that is no return
            events += self._see_card(card, state, sweep.mono_us)
        events += self._see_absent() + self._see_epoch(sweep)
        self._known = (self._known or set()) | self.states.keys()
        self._answered |= {key for key, state in self.states.items() if state == "ok"}
        if "" in self._hung and not self.is_hung(""):
            events += [event for event in (self.end_hang(""),) if event]
        if before != (self._lost, set(self._hung)):
            self._keep()
        return events

    def hear(self, event: Event) -> Event | None:
        """What the kernel log says: the event to report, or None when this loss is already known.

        Driver and kernel log both see most losses; whoever is first tells it.
        """
        if event.kind != "gpu_lost":
            return event
        kind, _, name = event.entity.partition(":")
        if kind == "node":
            return event
        card = self._cards.get(name) if kind == "pci" else None
        uuid = card.uuid if card else name if kind == "gpu" else _detail(event, "uuid")
        pci = name if kind == "pci" else _detail(event, "pci")
        if uuid in self._lost or pci in self._lost:
            return None
        if not uuid and any(card.pci == pci for card in self._lost.values()):
            return None
        self._mark_lost(LostCard(uuid, pci, max(1, event.mono_us)))
        self._keep()
        if not uuid:
            return event
        detail = _details(event)
        detail["serial"] = detail.get("serial") or self._serials.get(uuid)
        return replace(event, entity=f"gpu:{uuid}", detail=json.dumps(detail))

    def see_inventory(self, inventory: Inventory) -> None:
        """Remember the serials."""
        for item in inventory.items:
            serial = item.attributes.get("serial")
            if serial:
                self._serials[item.entity.partition(":")[2]] = serial
            if item.entity == "node:":
                self._versions = {
                    name: item.attributes[key]
                    for name, key in (("driver", "driver_version"), ("library", "library_version"))
                    if key in item.attributes
                }

    def see_bus(self, sweep: Sweep) -> None:
        """Which addresses answer on the bus, by a sweep of probe `pci`."""
        if not sweep.error:
            self._on_bus = {row[_PCI] for row in sweep.rows if row[_PRESENT] is True}

    def lost_due(self) -> list[Hang]:
        """Lost cards that are on the bus, and may be looked for in a process of their own now.

        A card that was reset is another one to the driver's library until that is initialised anew, which a
        sampler with other cards to read does not do. What is returned is what a trial needs, no episode.
        """
        now = self._clock_us()
        lost = {card.pci: card for card in self._lost.values() if not card.heard_us}
        self._looked_for = {pci: look for pci, look in self._looked_for.items() if pci in lost}
        due: list[Hang] = []
        for pci, card in lost.items():
            if self.states.get(card.uuid or pci) != "lost" or pci not in self._on_bus or self.is_hung(pci):
                continue
            tries, at_us = self._looked_for.setdefault(pci, (0, now + int(self._retry_s * 1e6)))
            if now >= at_us:
                due.append(Hang(pci, self._boot_id, "", pci, card.uuid, -1, now, tries))
        return due

    def _is_lost(self, card: Card) -> bool:
        return bool({card.uuid or card.pci, card.pci} & self._lost.keys())

    def _see_card(self, card: Card, state: str, at_us: int) -> list[Event]:
        key = card.uuid or card.pci
        lost = self._lost.get(key) or self._lost.get(card.pci)
        if state == "lost" and lost is None:
            return [self._lose(card, "no_answer", "no longer answers the driver")]
        if state == "lost" and lost is not None and (lost.heard_us or not lost.uuid):
            self._lost.pop(card.pci, None)
            self._mark_lost(LostCard(card.uuid, card.pci))
        if state != "ok":
            return []
        if lost is not None and lost.heard_us and at_us < lost.heard_us + _DOUBT_US:
            return []
        events: list[Event] = []
        for one in (key, card.pci):
            self._lost.pop(one, None)
        if lost is not None:
            events.append(self._find(card, "back", "answers again"))
        elif self._known is not None and key not in self._known:
            events.append(self._find(card, "new", "is new here and answers"))
        if card.pci in self._hung and not self.is_hung(card.pci):  # hung before a reboot
            events += [event for event in (self.end_hang(card.pci),) if event]
        return events

    def _see_absent(self) -> list[Event]:
        """Cards that answered and are no longer in the driver's list."""
        gone = self._answered - self.states.keys() - self._lost.keys()
        return [
            self._lose(
                self._by_uuid.get(key, Card("", key, -1)), "not_listed", "is no longer listed by the driver"
            )
            for key in sorted(gone)
        ]

    def _see_epoch(self, sweep: Sweep) -> list[Event]:
        epochs = [_number(row, "driver_epoch") for row in sweep.rows]
        if not epochs:
            return []
        before, self._epoch = self._epoch, epochs[0]
        if before is None or self._epoch <= before:
            return []
        return [
            happened("driver_reloaded", "node:", "the driver was loaded anew", detail={"epoch": epochs[0]})
        ]

    def _lose(self, card: Card, code: str, what: str) -> Event:
        self._mark_lost(LostCard(card.uuid, card.pci))
        return self._card_event("gpu_lost", card, code, what)

    def _mark_lost(self, card: LostCard) -> None:
        self._lost[card.uuid or card.pci] = card
        while len(self._lost) > _MOST:
            del self._lost[next(iter(self._lost))]

    def _find(self, card: Card, code: str, what: str) -> Event:
        return self._card_event("gpu_found", card, code, what)

    def _card_event(self, kind: str, card: Card, code: str, what: str) -> Event:
        detail = {"pci": card.pci, "serial": self._serials.get(card.uuid), "code": code}
        entity = f"gpu:{card.uuid}" if card.uuid else f"pci:{card.pci}"
        return happened(kind, entity, f"GPU {card.pci} {what}", code, detail)

    def entity(self, pci: str) -> str:
        """The entity of the card at `pci`; of the host when there is none."""
        card = self._cards.get(pci)
        if card is not None:
            return f"gpu:{card.uuid}"
        known = next((hang.uuid for hang in self._hung.values() if hang.pci == pci and hang.uuid), "")
        if known:
            return f"gpu:{known}"
        return f"pci:{pci}" if pci else "node:"

    def _keep(self) -> None:
        kept = Kept(
            list(self._hung.values()),
            list(self._lost.values()),
            self._mismatch,
            self._released_until_us,
            self._boot_id,
        )
        self._save(msgspec.json.encode(kept).decode())


def skip_of(hang: Hang) -> Skip:
    """What the sampler is told about it."""
    return Skip(hang.what, hang.uuid, hang.index)


def _details(event: Event) -> dict[str, object]:
    try:
        found = json.loads(event.detail or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _detail(event: Event, key: str) -> str:
    found = _details(event).get(key)
    return found if isinstance(found, str) else ""


def _text(row: list[Value | None], name: str) -> str:
    cell = row[_COLUMNS[name]]
    return cell if isinstance(cell, str) else ""


def _is_live(row: list[Value | None]) -> bool:
    return any(row[_COLUMNS[name]] is not None for name in _LIVE)


def _number(row: list[Value | None], name: str) -> int:
    cell = row[_COLUMNS[name]]
    return cell if isinstance(cell, int) else -1


def _born(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text() if pid else ""
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _alive(hang: Hang) -> bool:
    """Whether the process that was stuck in it is still there."""
    return bool(hang.orphan) and _born(hang.orphan) == hang.orphan_born != ""
