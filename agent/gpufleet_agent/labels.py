"""Labels of a host: what it shares with others that can fail (rack, leaf_switch, pool, ...)."""

import re
from collections.abc import Mapping

MOST_LABELS = 16

PLAIN = r"[\x21-\x7e](?:[\x20-\x7e]{0,62}[\x21-\x7e])?"
"""1 to 64 printable letters of ASCII, no space at either end."""

PREFIX = "label."
"""How the attributes of a host that are labels begin."""

_KNOWN = ("agent", "driver", "firmware", "fleet", "job", "kernel", "model", "server", "vbios")
"""What the collector knows by itself."""


def attributes(labels: Mapping[str, str]) -> dict[str, str]:
    """As the inventory shows them."""
    return {f"{PREFIX}{name}": value for name, value in labels.items()}


def first_wrong(labels: Mapping[str, str]) -> tuple[str, str] | None:
    """The key below `labels` (empty: all of it) that cannot be used, and why; None = they are fine."""
    if len(labels) > MOST_LABELS:
        return "", f"{len(labels)} labels, {MOST_LABELS} are allowed"
    for name, value in labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name) or name in _KNOWN:
            return name, "is no name for a label: a word in small letters, as rack"
        if not re.fullmatch(PLAIN, value):
            return name, f"{value!r:.80} is no label: 1 to 64 plain letters"
    return None
