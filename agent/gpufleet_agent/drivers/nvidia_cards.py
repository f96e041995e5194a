"""Models of NVIDIA cards by exact name or PCI device; the data is nvidia_cards.toml beside this file.

For the inventory alone: nothing is judged by these figures, and a card that is not listed is as good as one
that is.
"""

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

_FIGURES = ("sm_clock_max_mhz", "mem_clock_max_mhz", "power_limit_default_w", "pcie_gen_card_max")


@dataclass(frozen=True, slots=True)
class CardModel:
    """One model.

    Attributes:
        kind: datacenter, workstation, consumer, or integrated (shares the host's memory and bus).
        form_factor: sxm5, pcie, superchip, ...
        figures: What the maker says of it, by inventory attribute.
        source: Where the figures are from.
    """

    kind: str
    form_factor: str
    figures: tuple[tuple[str, str], ...]
    source: str

    def attributes(self) -> dict[str, str]:
        """The figures as inventory attributes."""
        return dict(self.figures)


def find(name: str, device: str) -> CardModel | None:
    """The model of a card: by its whole name, else by a PCI device that only one model has."""
    names, devices = _catalogue()
    return names.get(name) or devices.get(device)


@lru_cache(maxsize=1)
def _catalogue() -> tuple[dict[str, CardModel], dict[str, CardModel]]:
    text = resources.files("gpufleet_agent.drivers").joinpath("nvidia_cards.toml").read_text(encoding="utf-8")
    names: dict[str, CardModel] = {}
    devices: dict[str, CardModel] = {}
    shared: set[str] = set()
    for entry in tomllib.loads(text)["card"]:
        figures = tuple((name, str(entry[name])) for name in _FIGURES if name in entry)
        model = CardModel(entry["kind"], entry["form_factor"], figures, entry["source"])
        names |= dict.fromkeys(entry["names"], model)
        for device in entry["devices"]:
            if device in devices:
                shared.add(device)
            devices[device] = model
    return names, {device: model for device, model in devices.items() if device not in shared}
