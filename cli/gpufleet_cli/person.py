"""What verbs take from a person: who it is, for how long, from when, and what a silence covers."""

import getpass
import re
from datetime import UTC, datetime

from gpufleet_cli import errors
from gpufleet_cli.errors import FleetError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"(?:\d{1,9}[smhd])+", re.ASCII)

KEYS = {"node": "nodes", "rule": "rules", "entity": "entities", "serial": "serials"}
"""What a matcher may name -> the field of the request."""


def author() -> str:
    """The name of who types, as the system knows it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def seconds(word: str) -> float:
    """Seconds of `90m`, `4h`, `1d12h`.

    Raises:
        FleetError: It is no duration.
    """
    if not _SPAN.fullmatch(word):
        raise _usage(f"{word!r} is no duration", "write 90m, 4h, 7d or 1d12h")
    return float(sum(int(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"\d+[smhd]", word)))


def moment(word: str) -> int:
    """Microseconds since the epoch of `2026-12-01T08:00`, UTC when it says no zone.

    Raises:
        FleetError: It is no time.
    """
    try:
        at = datetime.fromisoformat(word)
    except ValueError:
        raise _usage(
            f"{word!r} is no time", "write 2026-12-01T08:00 (UTC) or 2026-12-01T08:00+01:00"
        ) from None
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return int(at.timestamp() * 1_000_000)


def matcher(words: tuple[str, ...]) -> dict[str, list[str]]:
    """What `node=gpu-[001-004] rule=xid` names, by the fields of the request.

    Raises:
        FleetError: A word is no `KEY=VALUE` of `KEYS`.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if key not in KEYS or not sign or not value:
            raise _usage(
                f"{word!r} is no matcher",
                "write node=gpu-[001-004], rule=xid, entity=gpu:GPU-1b2c or serial=1650",
            )
        if key == "node":
            values = expand(value)
        else:
            values = [value] if key == "entity" else [one for one in value.split(",") if one]
        found.setdefault(KEYS[key], []).extend(values)
    return found


def whole_number(word: str, what: str) -> int:
    """A positive number as the collector counts silences and windows.

    Raises:
        FleetError: It is none.
    """
    if word.isascii() and word.isdigit() and 0 < int(word[:19]) < 2**63 and len(word) < 20:
        return int(word)
    raise _usage(f"{word!r} is no {what}: write its number", "")


def _usage(text: str, hint: str) -> FleetError:
    return FleetError("usage", text, hint, errors.USAGE)


def expand(word: str) -> list[str]:
    """The names of a hostlist: `gpu-[001-003,7]` and `a,b`.

    Raises:
        FleetError: The brackets do not fit, or it names more than 100000.
    """
    names: list[str] = []
    for part in _split(word):
        head, bracket, rest = part.partition("[")
        if not bracket:
            names.append(part)
            continue
        inside, closing, tail = rest.partition("]")
        if not closing or not inside:
            raise _bad(word)
        for piece in inside.split(","):
            first, dash, last = piece.partition("-")
            last = last if dash else first
            if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()) or int(
                last
            ) < int(first):
                raise _bad(word)
            if int(last) - int(first) + len(names) > 100_000:
                raise _bad(word)
            for value in range(int(first), int(last) + 1):
                names.extend(expand(f"{head}{value:0{len(first)}}{tail}"))
    return names


def _split(word: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(word):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(word[start:at])
            start = at + 1
    return [part for part in [*parts, word[start:]] if part]


def _bad(word: str) -> FleetError:
    return _usage(f"{word!r} is no host list: write gpu-[001-016] or gpu-001,gpu-002", "")
