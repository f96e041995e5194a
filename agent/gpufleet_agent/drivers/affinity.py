"""How near two PCI devices are, by where /sys puts them: the words of `nvidia-smi topo -m`."""

import re
from collections.abc import Mapping
from itertools import accumulate

from gpufleet_agent.drivers import files

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"/(pci[0-9a-f]{4,8}:[0-9a-f]{2})/")
WORDS = ("pix", "pxb", "phb", "node", "sys")
"""At most one bridge between them; several; their root complex; their NUMA node; the link between nodes."""


def relation(one: str, other: str, same_node: bool) -> str:
    """One of `WORDS` for two devices, by their real paths in /sys.

    Args:
        one: Real path of a device.
        other: Of the other.
        same_node: Whether both are of one NUMA node.
    """
    mine, theirs = _bridges(one), _bridges(other)
    common = sum(accumulate((one == other for one, other in zip(mine, theirs, strict=False)), min))
    if common:
        return "pix" if max(len(mine), len(theirs)) - common <= 1 else "pxb"
    roots = [_ROOT.search(path) for path in (one, other)]
    if roots[0] and roots[1] and roots[0][1] == roots[1][1]:
        return "phb"
    return "node" if same_node else "sys"


def order(device: str, node: int | None, cards: Mapping[str, str]) -> list[tuple[str, str]]:
    """(card, word) of every card, the nearest first.

    Args:
        device: Real path of the device.
        node: Its NUMA node; None = unknown.
        cards: Address of each card -> its real path.
    """
    found: list[tuple[str, str]] = []
    for card, path in cards.items():
        text = files.plain(files.brief(f"{path}/numa_node"))
        found.append((card, relation(device, path, node is not None and text == str(node))))
    return sorted(found, key=lambda pair: (WORDS.index(pair[1]), pair[0]))


def _bridges(path: str) -> list[str]:
    """Addresses of the bridges above a device, from the root down."""
    return [part for part in path.split("/") if _ADDRESS.fullmatch(part)][:-1]
