"""Kernel records -> events: joins what the kernel spreads over lines, and folds what it repeats.

`drivers/kmsg.py` hands records in order; each `Reader` turns them into events and keeps, in a `State` that
travels in the cursor, all that the next call or the next process needs: half-read forms, cards already
reported lost, servers that do not answer, counts not yet reported. So an event is told once, whoever reads.

Time: a record is stamped with the kernel's clock since boot, which stands still in suspend and runs a little
apart from the system's. An event's time is therefore counted back from now: now - (uptime - stamp).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from gpufleet import catalogue
from gpufleet.catalogue import Catalogue
from gpufleet.event import Event
from gpufleet_agent import kernel_lines as lines
from gpufleet_agent.kernel_lines import NODE, Detail, Said

FOLD_US = 60_000_000
"""After the first of its kind, the same again within this time is counted and told once at its end."""

HOLD_US = 1_000_000
"""A line that may be explained by the next ones waits this long for them."""

JOIN_US = 5_000_000
"""The lines of one form come within this time, whatever other lines come between them."""

MAX_FOLDS = 32
MAX_CARDS = 64
MAX_SERVERS = 64
MAX_PIDS = 16
MAX_HALF = 16

MAX_LINE = 2048
MAX_MESSAGE_BYTES = 512
MAX_DETAIL_BYTES = 3072


@dataclass(frozen=True, slots=True)
class Record:
    """One kernel record.

    Attributes:
        seq: Its number since boot; -1 where the source has none.
        stamp_us: The kernel's clock when it was written, microseconds since boot.
        text: Decoded; may hold line ends where the kernel wrote several lines at once.
    """

    seq: int
    stamp_us: int
    text: str


@dataclass(frozen=True, slots=True)
class Now:
    """One moment on the three clocks, microseconds: wall, since boot with suspend, and the kernel's."""

    wall_us: int
    boot_us: int
    kernel_us: int


class Told(msgspec.Struct, array_like=True):
    """An event in the making."""

    kind: str
    entity: str
    code: str
    stamp_us: int
    ts_us: int
    mono_us: int
    count: int
    message: str
    detail: dict[str, Detail]


class Fold(msgspec.Struct, array_like=True):
    """What came after the first of its kind: how many, since when, the last one, and whose.

    Records are compared by their stamps; when it is due is told by the clock at arrival: the two clocks drift
    apart by minutes in a long uptime.
    """

    opened_us: int
    arrived_us: int
    count: int = 0
    first_us: int = 0
    last: Told | None = None
    pids: list[int] = []


class Held(msgspec.Struct, array_like=True):
    """An event that waits for an explanation; `group` is what cancels or completes it."""

    arrived_us: int
    group: str
    same: str
    told: Told


class Card(msgspec.Struct, array_like=True):
    """What a card is called besides its address, and who said so: "log", "driver" or "earlier boot"."""

    uuid: str = ""
    serial: str = ""
    source: str = ""


class Server(msgspec.Struct, array_like=True):
    """An NFS server: since when it does not answer (-1 = it does), and how often the kernel said so."""

    since_us: int
    lines: int


class State(msgspec.Struct, omit_defaults=True):
    """Where reading stands and what is half told. Small; lives in the cursor.

    Attributes:
        boot: Boot id that all of it belongs to.
        seq: Last record read from /dev/kmsg; -1 = none of this boot.
        stamp_us: Stamp of the last record read from either source.
        learning: What the log holds already is only learned from, never reported, until its end is seen.
        journal: Cursor of the last record read from the journal.
        blind: Why no source could be read, as last told; "" = it can.
    """

    boot: str = ""
    seq: int = -1
    stamp_us: int = -1
    learning: bool = False
    journal: str = ""
    blind: str = ""
    cards: dict[str, Card] = {}
    lost: dict[str, int] = {}
    half: list[tuple[str, int]] = []
    folds: dict[str, Fold] = {}
    held: list[Held] = []
    servers: dict[str, Server] = {}
    doomed: dict[str, tuple[str, int]] = {}
    seen: dict[str, int] = {}


def next_boot(state: State, boot: str) -> State:
    """What is still true after a reboot: the cards' names, and whether the log could be read."""
    cards = {pci: Card(card.uuid, card.serial, "earlier boot") for pci, card in state.cards.items()}
    return State(boot=boot, blind=state.blind, cards=cards)


def no_uuid(pci: str) -> str:
    """For hosts whose driver knows no cards."""
    return ""


class Reader:
    """Feeds on records, gives events. One per cursor; `state` is all it remembers."""

    def __init__(
        self,
        state: State,
        words: Catalogue | None = None,
        uuid_of: Callable[[str], str] = no_uuid,
    ) -> None:
        self.state = state
        self._words = words or catalogue.load()
        self._uuid_of = uuid_of
        self._out: list[Told] = []
        self._recent: dict[str, Told] = {}
        self._now = Now(0, 0, 0)
        self._oldest_boot_us = 0
        self._stamp_us = 0
        self._serial_for = ""
        self._hardware_us = -HOLD_US - 1

    @property
    def waiting(self) -> int:
        """Events that `finish` will hand out."""
        return len(self._out)

    def begin(self, now: Now, drained_boot_us: int = 0) -> None:
        """Start of a call. What is new was written after `drained_boot_us`, when the log was last empty."""
        self._now = now
        self._oldest_boot_us = drained_boot_us

    def feed(self, record: Record) -> None:
        """Take one record the kernel itself wrote, in order."""
        self.state.stamp_us = max(self.state.stamp_us, record.stamp_us)
        self._stamp_us = record.stamp_us
        text = record.text[:MAX_LINE]
        if not lines.interesting(text):
            if self._recent:
                self._amend(text)
            return
        first, *rest = text.split("\n")
        line = lines.bare(first)
        if lines.names_a_process(first) or lines.names_a_process(line):
            return
        if self.state.learning:
            self._learn(line)
        elif line.startswith("NVRM: "):
            self._nvrm(line, rest)
        elif line.startswith("nvidia-nvswitch"):
            self._nvswitch(line)
        else:
            self._other(line)

    def finish(self) -> list[Event]:
        """End of a call: what is due, oldest first."""
        now_us = self._now.boot_us
        self._let_go([held for held in self.state.held if now_us - held.arrived_us >= HOLD_US])
        for key, fold in list(self.state.folds.items()):
            if now_us - fold.arrived_us >= FOLD_US:
                del self.state.folds[key]
                self._tell_fold(fold)
                if fold.last is not None:  # the storm may go on: keep counting
                    self.state.folds[key] = Fold(fold.last.stamp_us, now_us)
        told, self._out = self._out, []
        self._recent.clear()
        return [_event(one) for one in sorted(told, key=lambda one: one.stamp_us)]

    def note(self, code: str, message: str, count: int = 1, **detail: Detail) -> None:
        """An event about reading the log itself, of now."""
        now = self._now
        self._out.append(
            Told("kernel_log", NODE, code, now.kernel_us, now.wall_us, now.boot_us, count, message, detail)
        )

    # ------------------------------------------------------------ time, folding, holding

    def _told(self, said: Said, message: str) -> Told:
        age = max(0, self._now.kernel_us - self._stamp_us)
        if self._oldest_boot_us:
            age = min(age, max(0, self._now.boot_us - self._oldest_boot_us))
        detail: dict[str, Detail] = {"severity": said.severity, **said.detail}
        detail["kernel_s"] = self._stamp_us / 1e6
        if said.entity.startswith("pci:"):
            card = self._card(said.entity[4:])
            if card is not None:
                names = {"uuid": card.uuid, "serial": card.serial, "named_by": card.source}
                detail |= {key: value for key, value in names.items() if value}
        return Told(
            said.kind,
            said.entity,
            said.code,
            self._stamp_us,
            self._now.wall_us - age,
            self._now.boot_us - age,
            said.count,
            _clean(message, MAX_MESSAGE_BYTES),
            detail,
        )

    def _tell(self, said: Said, message: str) -> Told:
        told = self._told(said, message)
        self._fold(told, said.same)
        return told

    def _fold(self, told: Told, same: str) -> None:
        folds = self.state.folds
        key = f"{told.kind} {told.entity} {told.code} {same}"[:256]
        fold = folds.get(key)
        if fold is not None and (fold.count or told.stamp_us - fold.opened_us < FOLD_US):
            fold.first_us = fold.first_us if fold.count else told.stamp_us
            fold.count += told.count
            fold.last = told
            pid = told.detail.get("pid")
            if isinstance(pid, int) and pid not in fold.pids and len(fold.pids) < MAX_PIDS:
                fold.pids.append(pid)
            if told.stamp_us - fold.opened_us >= FOLD_US:
                self._tell_fold(folds.pop(key))
                folds[key] = Fold(told.stamp_us, self._now.boot_us)
            return
        folds.pop(key, None)
        self._out.append(told)
        folds[key] = Fold(told.stamp_us, self._now.boot_us)
        if len(folds) > MAX_FOLDS:
            self._tell_fold(folds.pop(next(iter(folds))))

    def _tell_fold(self, fold: Fold) -> None:
        """Report what was counted since the first."""
        last = fold.last
        if last is None:
            return
        last.count = fold.count
        last.detail |= {"folded": True, "first_kernel_s": fold.first_us / 1e6}
        if len(fold.pids) > 1:
            last.detail["pids"] = list(fold.pids)
        self._out.append(last)

    def _hold(self, group: str, said: Said, message: str) -> Told:
        told = self._told(said, message)
        self.state.held.append(Held(self._now.boot_us, group, said.same, told))
        if len(self.state.held) > MAX_HALF:
            self._release_one(self.state.held.pop(0))
        return told

    def _release(self) -> None:
        """Let go of what waited long enough by the record at hand: nothing came that would explain it."""
        self._let_go([held for held in self.state.held if self._stamp_us - held.told.stamp_us >= HOLD_US])

    def _let_go(self, due: list[Held]) -> None:
        if due:
            self.state.held = [held for held in self.state.held if held not in due]
            for held in due:
                self._release_one(held)

    def _release_one(self, held: Held) -> None:
        told = held.told
        if held.group.startswith("apei "):
            said = _said(told)
            lines.apei_done(said)
            told.kind, told.entity, told.code = said.kind, said.entity, said.code
            told.detail["severity"] = said.severity
        self._fold(told, held.same)

    def _drop_held(self, kind: str, code: str) -> None:
        """What waited is explained: the explanation counts, not both."""
        self.state.held = [
            held for held in self.state.held if not (held.told.kind == kind and held.told.code == code)
        ]

    # ------------------------------------------------------------ cards

    def _card(self, pci: str) -> Card | None:
        uuid = self._uuid_of(pci)
        known = self.state.cards.get(pci)
        if uuid and (known is None or known.uuid != uuid):
            known = self._know(pci, Card(uuid, "", "driver"))
        return known

    def _know(self, pci: str, card: Card) -> Card:
        cards = self.state.cards
        cards.pop(pci, None)
        cards[pci] = card
        if len(cards) > MAX_CARDS:
            del cards[next(iter(cards))]
        return card

    def _learn(self, line: str) -> bool:
        """Lines that only name things: UUID and serial of the card at an address."""
        found = lines.UUID.match(line)
        if found is not None:
            pci = self._serial_for = lines.pci_address(found["pci"])
            known = self.state.cards.get(pci)
            if known is None or known.uuid != found["uuid"]:
                self._know(pci, Card(found["uuid"], "", "log"))
            return True
        found = lines.BOARD_SERIAL.match(line)
        if found is not None:
            self._serial(self._serial_for, found["serial"])
            self._serial_for = ""
            return True
        found = lines.CARD_SERIAL.match(line)
        if found is not None:
            self._serial(lines.pci_address(found["pci"]), found["serial"])
            return True
        return False

    def _serial(self, pci: str, serial: str) -> None:
        if pci:
            known = self.state.cards.get(pci) or Card("", "", "log")
            self._know(pci, Card(known.uuid, serial, known.source))

    def _lost(self, pci: str, form: str, message: str, detail: Mapping[str, Detail] | None = None) -> None:
        """A card fell off the bus: once per card until the driver or the bus starts it anew."""
        if pci:
            if pci in self.state.lost:
                return
            self.state.lost[pci] = self._stamp_us
            if len(self.state.lost) > MAX_CARDS:
                del self.state.lost[next(iter(self.state.lost))]
        words: dict[str, Detail] = {"pci": pci or None, "form": form, "action": "reboot", **(detail or {})}
        self._tell(Said("gpu_lost", f"pci:{pci}" if pci else NODE, "off_bus", "critical", words), message)

    # ------------------------------------------------------------ the NVIDIA driver

    def _nvrm(self, line: str, rest: list[str]) -> None:
        if line.startswith("NVRM: Xid"):
            self._xid(line)
        elif self._learn(line):
            pass
        elif found := lines.OFF_BUS.match(line):
            self._lost(lines.pci_address(found["pci"]), "no_xid", line)
        elif found := lines.PROBED.match(line):
            self._probed(lines.pci_address(found["pci"]), [line, *rest])
        elif lines.OFF_BUS_END.match(line):
            self._off_bus_end(line)
        elif lines.NOT_SUPPORTED.match(line):
            self._forget_half()
        elif lines.DRIVER_LOADED.match(line):
            self.state.lost.clear()
        elif said := lines.init_failed(line):
            self._tell(said, line)

    def _xid(self, line: str) -> None:
        heard = lines.xid(line, self._words)
        if heard is None:
            self._tell(lines.unparsed(line, "xid"), line)
            return
        for said in heard:
            self._tell(said, line)
        if heard[0].code == "79":
            self._lost(heard[0].entity[4:], "xid_79", line)

    def _probed(self, pci: str, text: list[str]) -> None:
        """The first of three lines; the kernel may hand all three at once."""
        if any("not supported by" in line for line in text):
            return
        if any("fallen off the bus" in line for line in text):
            self._lost(pci, "probe", " ".join(line.strip().removeprefix("NVRM: ") for line in text))
            return
        self.state.half.append((pci, self._stamp_us))
        del self.state.half[:-MAX_HALF]

    def _off_bus_end(self, line: str) -> None:
        """The last of three lines: it names no card, the oldest first line still open does."""
        self._forget_old_half()
        pci = self.state.half.pop(0)[0] if self.state.half else ""
        self._lost(pci, "probe", line)

    def _forget_half(self) -> None:
        """`... is not supported by the driver`: another ending of the same first line."""
        self._forget_old_half()
        del self.state.half[:1]

    def _forget_old_half(self) -> None:
        self.state.half = [half for half in self.state.half if self._stamp_us - half[1] < JOIN_US]

    def _nvswitch(self, line: str) -> None:
        if "SXid" not in line:
            return
        switch = lines.sxid(line, self._words)
        if switch is None:
            self._tell(lines.unparsed(line, "sxid"), line)
            return
        key = f"sxid {switch.key}"
        head = self._recent.get(key)
        if switch.head:
            self._recent[key] = self._tell(switch.said, line)
            self.state.seen[key] = self._stamp_us
            self._trim(self.state.seen)
        elif head is not None:
            for name in ("engine", "subengine"):
                if name in switch.said.detail:
                    head.detail[name] = switch.said.detail[name]
        elif self._stamp_us - self.state.seen.get(key, -JOIN_US) >= JOIN_US:
            # Its head was overwritten before it was read: better one event from a continuation than none.
            self.state.seen[key] = self._stamp_us
            self._recent[key] = self._tell(switch.said, line)

    # ------------------------------------------------------------ the rest of the kernel

    def _other(self, line: str) -> None:
        if self._hardware(line) or self._aer(line) or self._nfs(line) or self._oom(line):
            return
        if found := lines.ENUMERATED.match(line):
            self.state.lost.pop(lines.pci_address(found["pci"]), None)
        elif said := lines.stuck(line):
            self._recent["stack"] = self._tell(said, line)
        elif said := lines.io_error(line):
            self._tell(said, line)
        elif self._recent:
            self._amend(line)

    def _amend(self, line: str) -> None:
        """Lines that add to the event just told: error bits of a device, modules in a stack."""
        found = lines.AER_STATUS.match(line) or lines.AER_BIT.match(line)
        if found is not None:
            told = self._recent.get(f"aer {lines.pci_address(found['pci'])}")
            parts = found.groupdict()
            if told is not None and "status" in parts:
                told.detail["status"] = f"0x{parts['status']}"
            elif told is not None:
                _append(told.detail, "bits", parts["bit"])
            return
        told = self._recent.get("stack")
        if told is not None and self._stamp_us - told.stamp_us < HOLD_US:
            found = lines.STACK_MODULE.match(line)
            if found is not None:
                _append(told.detail, "modules", found["module"])

    def _aer(self, line: str) -> bool:
        said = lines.aer(line)
        port = None if said else lines.aer_port(line)
        self._release()
        if said is not None:
            self._drop_held("aer", said.code)
            self._recent[f"aer {said.entity[4:]}"] = self._tell(said, line)
        elif port is not None:
            self._hold("aer", port, line)
        return said is not None or port is not None

    def _hardware(self, line: str) -> bool:
        if "Hardware Error]" not in line and not line.startswith(("EDAC ", "Memory failure: ", "BERT: ")):
            return False
        self._release()
        said = lines.mce(line) or lines.edac(line)
        if said is not None:
            self._drop_held("mce", "logged")
            self._drop_held("edac", said.code)
            self._hardware_us = self._stamp_us
            self._tell(said, line)
        elif lines.MCE_LOGGED.match(line):
            if self._stamp_us - self._hardware_us > HOLD_US and not any(
                held.group == "logged" for held in self.state.held
            ):
                self._hold("logged", Said("mce", NODE, "logged", "warning"), line)
        elif lines.BERT.match(line):
            self._tell(Said("mce", NODE, "previous_boot", "warning"), line)
        elif found := lines.APEI.match(line):
            self._apei(f"apei {found['tag']}", found["rest"], line)
        return True

    def _apei(self, group: str, rest: str, line: str) -> None:
        """A firmware error record: one event from a block of lines that share a number."""
        if rest.startswith(lines.APEI_BEGIN):
            self._hold(group, Said("mce", NODE, "unknown", "warning", {"source": "firmware"}), line)
            return
        for held in reversed(self.state.held):
            if held.group == group:
                said = _said(held.told)
                lines.apei_field(rest, said)
                held.told.kind, held.told.entity, held.told.code = said.kind, said.entity, said.code
                if said.kind == "edac" and self._stamp_us - self._hardware_us <= HOLD_US:
                    self.state.held.remove(held)
                return

    def _nfs(self, line: str) -> bool:
        """Pairs: the first `not responding` opens, `OK` closes and says how long; the rest is counted."""
        found = lines.NFS.match(line)
        if found is None:
            return False
        server, what = found["server"], found["what"]
        servers = self.state.servers
        known = servers.pop(server, None)
        if what == "OK":
            if known is None or known.since_us >= 0:
                detail: dict[str, Detail] = {"server": server, "duration_s": None}
                if known is not None:
                    detail["duration_s"] = max(0, self._stamp_us - known.since_us) / 1e6
                    detail["lines"] = known.lines
                self._out.append(self._told(Said("nfs", NODE, "ok", "info", detail), line))
            servers[server] = Server(-1, 0)
        elif known is not None and known.since_us >= 0:
            known.lines += 1
            servers[server] = known
        else:
            code = "timed_out" if what.endswith("timed out") else "not_responding"
            said = Said("nfs", NODE, code, "critical", {"server": server})
            self._out.append(self._told(said, line))
            servers[server] = Server(self._stamp_us, 1)
        if len(servers) > MAX_SERVERS:
            del servers[next(iter(servers))]
        return True

    def _oom(self, line: str) -> bool:
        where = lines.oom_where(line)
        if where is not None:
            pid, group = where
            self.state.doomed[pid] = (_clean(group, 256), self._stamp_us)
            if len(self.state.doomed) > MAX_HALF:
                del self.state.doomed[next(iter(self.state.doomed))]
            return True
        said = lines.oom(line)
        if said is None:
            return False
        pid = str(said.detail["pid"])
        group, _ = self.state.doomed.pop(pid, ("", 0))
        key = f"oom {pid}"
        seen = self.state.seen.get(key)
        self.state.seen[key] = self._stamp_us
        self._trim(self.state.seen)
        if seen is not None and self._stamp_us - seen < JOIN_US:
            return True  # older kernels say `Kill process` and then `Killed process`
        if group:
            said.detail["cgroup"] = group
        self._tell(said, line)
        return True

    @staticmethod
    def _trim(seen: dict[str, int]) -> None:
        while len(seen) > MAX_HALF:
            del seen[next(iter(seen))]


def _append(detail: dict[str, Detail], key: str, word: str) -> None:
    words = detail.setdefault(key, [])
    if isinstance(words, list) and word not in words and len(words) < MAX_HALF:
        detail[key] = [*(str(one) for one in words), word]


def _said(told: Told) -> Said:
    return Said(told.kind, told.entity, told.code, str(told.detail.get("severity")), told.detail)


def _event(told: Told) -> Event:
    return Event(
        told.kind,
        told.entity,
        told.ts_us,
        told.mono_us,
        told.code,
        told.message,
        _json(told.detail),
        min(max(told.count, 1), 0xFFFFFFFF),
    )


def _clean(text: str, size: int) -> str:
    """One printable line of valid UTF-8, at most `size` bytes."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return text.strip().encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


def _json(detail: dict[str, Detail]) -> str:
    """The detail as JSON of bounded size: the longest texts are cut first, no key is dropped."""
    fit = {key: _clean(value, 512) if isinstance(value, str) else value for key, value in detail.items()}
    for key, value in fit.items():
        if isinstance(value, list):
            fit[key] = [one if isinstance(one, int) else _clean(one, 64) for one in value[:MAX_HALF]]
    encoded = msgspec.json.encode(fit)
    while len(encoded) > MAX_DETAIL_BYTES:
        texts = [(len(value), key) for key, value in fit.items() if isinstance(value, str)]
        size, key = max(texts)
        fit[key] = str(fit[key])[: size // 2]
        encoded = msgspec.json.encode(fit)
    return encoded.decode()
