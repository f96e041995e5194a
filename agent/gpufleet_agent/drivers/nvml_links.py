"""The NVLinks of one card: which there are, which are up, and the counters that their generation has.

State, speed and counters of all links come by one batch call; what that does not have on this card or driver
is asked link by link. Which counters may be believed depends on the generation: Hopper answers the fields of
Ampere with a zero that means nothing, and Blackwell has other counters altogether.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpufleet.metric import Cell, Null, Reason, Row
from gpufleet_agent.drivers.nvml_card import Card
from gpufleet_agent.drivers.nvml_values import (
    Field,
    address,
    bit_error_rate,
    number,
    part,
    scaled,
    shown,
    word,
)

_MOST_LINKS = 36
_LOOK_S = 600.0
_INACTIVE, _ACTIVE = 0, 1
_STATES = {_INACTIVE: "inactive", _ACTIVE: "active", 2: "sleep", 3: "no_traffic"}
_REMOTE = {0: "gpu", 1: "cpu", 2: "switch", 255: "unknown"}
_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
_HOPPER, _BLACKWELL = 6, 7
_BY_ARCHITECTURE = {5: 2, 6: 3, 7: 4, 9: _HOPPER, 10: _BLACKWELL}
"""Generation of the links by that of the card, where no link tells; what is newer counts like Blackwell."""

_ABSENT = Null(Reason.NOT_SUPPORTED)
_UNKNOWN_KIND = Null(Reason.NOT_SUPPORTED, "unknown generation")


def _gigabytes(value: object) -> Cell:
    """From MB/s."""
    return scaled(value, 1e-3)


def _bytes(value: object) -> Cell:
    """From KiB."""
    found = number(value)
    return found if isinstance(found, Null) else int(found) * 1024


@dataclass(frozen=True, slots=True)
class _Counter:
    """A column that a field of each link gives.

    Attributes:
        column: Ours; of several for one column the sum counts.
        first: The field, asked of a link by its number; or, with `then`, the field of link 0.
        cell: What makes a cell of the raw value.
        then: Where every link has a field of its own: that of link 6.
    """

    column: str
    first: int
    cell: Callable[[object], Cell] = number
    then: int = 0

    def field(self, link: int, name: str) -> Field | None:
        """What to ask of a link; None where it has no such field."""
        if not self.then:
            return Field(self.first, name, self.cell, link)
        if link >= 12:
            return None
        return Field(self.first + link if link < 6 else self.then + link - 6, name, self.cell)


_COMMON = (_Counter("speed_gb_per_s", 164, _gigabytes),)
_THROUGHPUT = (_Counter("tx_bytes_total", 138, _bytes), _Counter("rx_bytes_total", 139, _bytes))
_AMPERE_COUNTERS = (
    *_COMMON,
    *_THROUGHPUT,
    _Counter("crc_errors_total", 32, then=96),
    _Counter("crc_errors_total", 39, then=102),
    _Counter("replays_total", 46, then=108),
    _Counter("recoveries_total", 53, then=114),
    _Counter("ecc_errors_total", 148, then=154),
)
_HOPPER_COUNTERS = (
    *_COMMON,
    *_THROUGHPUT,
    _Counter("replays_total", 161),
    _Counter("recoveries_total", 162),
    _Counter("crc_errors_total", 163),
)
_BLACKWELL_COUNTERS = (
    *_COMMON,
    _Counter("tx_bytes_total", 202),
    _Counter("rx_bytes_total", 204),
    _Counter("malformed_total", 206),
    _Counter("overruns_total", 207),
    _Counter("rx_errors_total", 208),
    _Counter("discards_total", 212),
    _Counter("recoveries_failed_total", 214),
    _Counter("recoveries_total", 215),
    _Counter("effective_errors_total", 219),
    _Counter("effective_ber", 220, bit_error_rate),
)
_BY_FUNCTION = {
    "replays_total": (0,), "recoveries_total": (1,), "crc_errors_total": (2, 3), "ecc_errors_total": (4,),
}  # fmt: skip
"""Column -> the library's kinds of counter of its function for one link; up to Hopper."""


class Links:
    """The links of one card, until the library is initialised anew.

    Args:
        card: How the card is asked.
        clock: Monotonic seconds.
    """

    def __init__(self, card: Card, clock: Callable[[], float]) -> None:
        self._card = card
        self._clock = clock
        self._looked_at = clock()
        self._count = 0
        self._version = 0
        self._up: frozenset[int] = frozenset()
        self._remotes: dict[int, tuple[Cell, Cell]] = {}
        self._asked: tuple[tuple[int, ...], Sequence[_Counter]] = ((), ())
        self._wanted: list[Field] = []

    def read(self, architecture: int) -> list[Row]:
        """One row per link; `architecture` is the library's number, 0 when it does not say.

        Raises:
            Lost: The card does not answer any more.
            DriverGone: No card does.
        """
        if self._clock() - self._looked_at >= _LOOK_S:
            # before a link has trained, a driver may say that it has no such thing
            self._looked_at = self._clock()
            self._card.forget("link")
        listed = self._list()
        if not listed:
            return []
        counters = self._counters(listed, architecture)
        found = self._card.fields(self._fields(tuple(listed), counters), batch="links")
        states = {
            link: state
            for link in listed
            if not _lacks(state := self._state(link, found[f"{link} state"], listed[link]))
        }
        up = frozenset(
            link
            for link, state in states.items()
            if (link in self._up if isinstance(state, Null) else state != _INACTIVE)
        )
        if up != self._up:
            self._card.forget("link")  # one that came up may have what it did not have before
            self._remotes = {link: known for link, known in self._remotes.items() if link in self._up & up}
            self._up = up
        return [self._row(link, state, counters, found) for link, state in states.items()]

    def _row(
        self, link: int, state: Cell, counters: Sequence[_Counter], found: Mapping[str, Cell]
    ) -> dict[str, Cell]:
        row: dict[str, Cell] = {
            "link": link,
            "link_state": word(state, _STATES),
            "version": word(self._version, _VERSIONS) if self._version else _ABSENT,
        }
        for at, counter in enumerate(counters):
            cell = found.get(f"{link} {at}", _ABSENT)
            row[counter.column] = _sum((row[counter.column], cell)) if counter.column in row else cell
        if not counters:
            row |= dict.fromkeys(_BY_FUNCTION, _UNKNOWN_KIND)
        elif counters is not _BLACKWELL_COUNTERS:
            for column, kinds in _BY_FUNCTION.items():
                if _lacks(row.get(column, _ABSENT)):
                    row[column] = _sum([self._ask(link, "ErrorCounter", kind) for kind in kinds])
        row["remote_kind"], row["remote_pci"] = self._remote(link)
        return row

    def _list(self) -> dict[int, Cell]:
        """The card's links, and their states where they had to be asked for to know."""
        if not self._count:
            told = self._card.fields((Field(91, "links"),))["links"]
            self._count = min(int(told), _MOST_LINKS) if isinstance(told, int) and told > 0 else 0
        if self._count:
            return dict.fromkeys(range(self._count), _ABSENT)
        found: dict[int, Cell] = {}
        for link in range(_MOST_LINKS):
            state = self._ask(link, "State")
            if _is_past_the_end(state):
                break
            if _lacks(state):
                continue
            found[link] = state
            if isinstance(state, Null):
                break  # the card cannot be asked now; how many links there are is not known
        return found

    def _state(self, link: int, said: Cell, known: Cell) -> Cell:
        """The library's number; not supported where there is no such link.

        A link is down only if both ways to ask say so: a field that a driver knows by name alone is zero.
        """
        if isinstance(said, int) and said != _INACTIVE:
            return said
        state = self._ask(link, "State") if _lacks(known) else known
        if isinstance(state, int):
            return state
        if isinstance(said, int):
            return said
        return _ABSENT if _lacks(said) and _is_past_the_end(state) else state

    def _counters(self, links: Iterable[int], architecture: int) -> Sequence[_Counter]:
        """The counters that links of this generation have; none when it is not known."""
        if not self._version:
            for link in links:
                told = self._ask(link, "Version")
                if isinstance(told, int) and told > 0:
                    self._version = told
                    break
        newest = _BLACKWELL if architecture > max(_BY_ARCHITECTURE) else 0
        version = self._version or _BY_ARCHITECTURE.get(architecture, newest)
        if not version:
            return ()
        if version < _HOPPER:
            return _AMPERE_COUNTERS
        return _HOPPER_COUNTERS if version == _HOPPER else _BLACKWELL_COUNTERS

    def _fields(self, links: tuple[int, ...], counters: Sequence[_Counter]) -> list[Field]:
        """State and counters of all links; the same as last time, as a rule."""
        if self._asked != (links, counters):
            self._asked = (links, counters)
            self._wanted = [Field(165, f"{link} state", scope=link) for link in links]
            for at, counter in enumerate(counters):
                fields = (counter.field(link, f"{link} {at}") for link in links)
                self._wanted += [field for field in fields if field is not None]
        return self._wanted

    def _remote(self, link: int) -> tuple[Cell, Cell]:
        """What is at the other end, and where; asked once, as long as the link is up."""
        if link not in self._up:
            return _ABSENT, _ABSENT
        if link not in self._remotes:
            kind = word(self._ask(link, "RemoteDeviceType"), _REMOTE)
            bus = part(self._card.ask(_REMOTE_PCI, link, key=f"link {link} {_REMOTE_PCI}"), "busId")
            pci = bus if isinstance(bus, Null) else address(shown(bus)) or _ABSENT
            self._remotes[link] = kind, pci
        return self._remotes[link]

    def _ask(self, link: int, what: str, *args: int) -> Cell:
        name = _CALLS[what]
        return number(self._card.ask(name, link, *args, key=f"link {link} {name}{args}"))


_CALLS = {
    "State": "nvmlDeviceGetNvLinkState",
    "Version": "nvmlDeviceGetNvLinkVersion",
    "RemoteDeviceType": "nvmlDeviceGetNvLinkRemoteDeviceType",
    "ErrorCounter": "nvmlDeviceGetNvLinkErrorCounter",
}
_REMOTE_PCI = "nvmlDeviceGetNvLinkRemotePciInfo"


def _lacks(cell: Cell) -> bool:
    return isinstance(cell, Null) and cell.reason is Reason.NOT_SUPPORTED


def _is_past_the_end(cell: Cell) -> bool:
    return isinstance(cell, Null) and cell.code == "NVML 2"


def _sum(cells: Sequence[Cell]) -> Cell:
    """Of what there is; none while something that should be there was not read."""
    unread = [cell for cell in cells if isinstance(cell, Null) and not _lacks(cell)]
    numbers = [cell for cell in cells if isinstance(cell, int | float)]
    return unread[0] if unread else sum(numbers) if numbers else cells[0]
