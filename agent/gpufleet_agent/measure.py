"""What a bench is: the shape of every file in `benches`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult, Check, Gpu, Host, go_on


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bench runs.

    Attributes:
        host: The open host; None for a bench of the host itself, which needs no driver.
        gpu: The card, for a bench on cards; of a pair, the one that sends.
        peer: The other card of a pair.
        state_dir: Where it may keep a file.
        check: To be called at least every tenth of a second; what it raises ends the run.
        cards: The host's cards, for a bench of the host: PCI address -> entity.
        command: A tool and its arguments; empty = the bench's own.
        deadline_s: So long a tool may take.
    """

    host: Host | None
    gpu: Gpu | None
    state_dir: str
    check: Check = go_on
    peer: Gpu | None = None
    cards: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    deadline_s: float = 60.0

    @property
    def kept(self) -> tuple[Gpu, ...]:
        """All that a run keeps for itself."""
        return tuple(card for card in (self.gpu, self.peer) if card is not None)


@dataclass(frozen=True, slots=True)
class Part:
    """One of several results of a run.

    Attributes:
        entity: What it is of.
        result: The result.
        convention: What was counted, and how.
        version: Of the tool that measured; empty = unknown, or the bench itself.
    """

    entity: str
    result: BenchResult
    convention: str
    version: str = ""


class Bench(Protocol):
    """A module with these names. Another VERSION, convention or PARAMS is another series of results."""

    @property
    def EVERY(self) -> float:
        """Default interval, seconds."""

    @property
    def VERSION(self) -> str:
        """Of the method."""

    @property
    def ON(self) -> Literal["host", "gpu", "pair"]:
        """Whether it runs once per host, once per card, or from each card to another one."""

    @property
    def CONVENTION(self) -> str:
        """What counts as a byte moved, and how it is moved."""

    @property
    def PARAMS(self) -> Mapping[str, Value]:
        """What it is run with."""

    @property
    def COST_S(self) -> float:
        """So long may one run keep a card for itself; 0 for a bench of the host."""

    def run(self, at: Place, params: Mapping[str, Value], /) -> tuple[BenchResult, str] | list[Part]:
        """Measure once: the result and the convention that was used, or the results of all its parts."""


class ToolBench(Bench, Protocol):
    """A bench of the host that runs a tool which somebody has installed. Off unless it is enabled."""

    @property
    def COMMAND(self) -> Sequence[str]:
        """What is run, unless another command is configured; empty = one must be."""

    @property
    def DEADLINE_S(self) -> float:
        """Default of the time that it may take."""


def ends(on: str, cards: Sequence[Gpu], entity: str = "", turn: int = 0) -> list[tuple[Gpu, Gpu | None]]:
    """Which cards a run is about, each with its peer where it needs one.

    A pair's cards are those at a distance on the bus that grows with each turn: every card sends once and is
    sent to once, and as many turns as there are other cards show all pairs in both directions. A card that is
    asked for sends to all others. A card that has no other one has no peer.

    Args:
        on: What the bench is on.
        cards: All of the host.
        entity: The one that was asked for; empty = all.
        turn: Counts rounds.
    """
    wanted = [card for card in cards if entity in ("", f"gpu:{card.uuid}")]
    if on != "pair":
        return [(card, None) for card in wanted]
    row = sorted(cards, key=lambda card: card.pci)
    if len(row) < 2:
        return [(card, None) for card in wanted]
    if entity:
        return [(card, other) for card in wanted for other in row if other is not card]
    step = 1 + turn % (len(row) - 1)
    return [(card, row[(at + step) % len(row)]) for at, card in enumerate(row)]


def on_card(name: str, at: Place, params: Mapping[str, Value], convention: str) -> tuple[BenchResult, str]:
    """Have the driver run a bench on the card, or on the pair: only it can reach them."""
    assert at.host is not None
    assert at.gpu is not None
    given: dict[str, Value] = {**params, "pci": at.gpu.pci}
    if at.peer is not None:
        given["peer"] = at.peer.pci
    result = at.host.run_bench(name, given, at.check)
    return result, result.convention or convention


def path(kind: str, card: str, peer: str) -> str:
    """The link of a pair: its kind and both places, e.g. `nvlink:1b:00>43:00`.

    What is zero in almost every address, domain and function, is left out.
    """

    def place(address: str) -> str:
        return address.removeprefix("0000:").removesuffix(".0")

    return f"{kind}:{place(card)}>{place(peer)}"


def params_hash(params: Mapping[str, Value], command: Sequence[str] = ()) -> str:
    """Names a set of parameters, and the command that was configured, if one was."""
    text = json.dumps(dict(params) | ({"command": list(command)} if command else {}), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
