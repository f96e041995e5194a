"""What a bench is: the shape of every file in `benches`."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from gpufleet.metric import Value
from gpufleet_agent.drivers import BenchResult, Gpu, Host


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bench runs.

    Attributes:
        host: The open host; None for a bench of the host itself, which needs no driver.
        gpu: The card, for a bench on cards.
        state_dir: Where it may keep a file.
    """

    host: Host | None
    gpu: Gpu | None
    state_dir: str


class Bench(Protocol):
    """A module with these names. Another VERSION, convention or PARAMS is another series of results."""

    @property
    def EVERY(self) -> float:
        """Default interval, seconds."""

    @property
    def VERSION(self) -> str:
        """Of the method."""

    @property
    def ON(self) -> Literal["host", "gpu"]:
        """Whether it runs once per host or once per card."""

    @property
    def CONVENTION(self) -> str:
        """What counts as a byte moved, and how it is moved."""

    @property
    def PARAMS(self) -> Mapping[str, Value]:
        """What it is run with."""

    def run(self, at: Place, params: Mapping[str, Value], /) -> tuple[BenchResult, str]:
        """Measure once: the result, and the convention that was used."""


def params_hash(params: Mapping[str, Value]) -> str:
    """Names a set of parameters."""
    text = json.dumps(dict(params), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
