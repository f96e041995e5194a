"""The link of a card's bench series: what it can do, not what it does now.

A link that trained down is what a bench shall show. Were its state a part of the series' name, the slow runs
would begin a series of their own, without a past to be slower than.
"""

import contextlib
import re
from collections.abc import Callable

import msgspec

_LINK = re.compile(r"pcie(\d{1,2})x(\d{1,3})")
_MOST = 1024


class Links:
    """The best that each entity's link has shown; kept over restarts.

    Args:
        text: What `save` was given last; anything unreadable counts as nothing.
        save: Keeps a text over restarts.
    """

    def __init__(self, text: str | None = None, save: Callable[[str], None] = lambda text: None) -> None:
        self._save = save
        self._best: dict[str, tuple[int, int]] = {}
        with contextlib.suppress(msgspec.MsgspecError):
            self._best = msgspec.json.decode(text or "{}", type=dict[str, tuple[int, int]])

    def best(self, entity: str, link: str) -> str:
        """The best that it was, `link` included; what is no PCIe link stays as it is."""
        found = _LINK.fullmatch(link)
        if found is None:
            return link
        gen, width = int(found[1]), int(found[2])
        known = self._best.get(entity, (0, 0))
        now = max(gen, known[0]), max(width, known[1])
        if now != known and len(self._best) < _MOST:
            self._best[entity] = now
            self._save(msgspec.json.encode(self._best).decode())
        return f"pcie{now[0]}x{now[1]}"
