"""Small text files of /proc and /sys: the text, a value in it, or a Null that says why there is none.

Nothing here raises for a file that is missing, unreadable, truncated or full of bytes.
"""

import errno
import math
import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from gpufleet.metric import Cell, Null, Reason

UNPARSABLE = Null(Reason.FAILED, "unparsable")

_PIECE = 1 << 16
_MOST_PIECES = 64


def why(error: OSError) -> Null:
    """Why a file could not be read."""
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTDIR, errno.EOPNOTSUPP):
        return Null(Reason.NOT_SUPPORTED, errno_word(error))
    if error.errno in (errno.EPERM, errno.EACCES):
        return Null(Reason.NO_PERMISSION, errno_word(error))
    return Null(Reason.FAILED, errno_word(error))


def errno_word(error: OSError) -> str:
    """ENOENT, ...; "failed" for an error without a number."""
    return errno.errorcode.get(error.errno or 0, "failed")


def read(path: Path) -> str | Null:
    """The text of a file, at most 4 MiB of it."""
    try:
        with path.open("rb", buffering=0) as file:
            # in pieces: /proc/sys refuses one read of megabytes
            pieces = iter(lambda: file.read(_PIECE), b"")
            return b"".join(islice(pieces, _MOST_PIECES)).decode(errors="replace")
    except OSError as error:
        return why(error)


def inode(path: Path) -> int:
    """Number of the file; 0 when there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def exists(path: Path) -> bool:
    """Whether it is there, as far as one may see."""
    try:
        return path.exists()
    except OSError:
        return False


def listed(path: Path) -> list[Path]:
    """What is in a directory, by name; empty when it cannot be listed."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def plain(text: str | Null) -> str:
    """One line that can be shown; empty for what could not be read."""
    if isinstance(text, Null):
        return ""
    return "".join(letter for letter in text.strip()[:256] if letter.isprintable() and letter != "\ufffd")


def parsed(text: str | Null, parse: Callable[[str], Cell]) -> Cell:
    """The value, or why there is none."""
    if isinstance(text, Null):
        return text
    try:
        return parse(text)
    except (ValueError, IndexError, KeyError):
        return UNPARSABLE


def pressure(text: str | Null, kind: str) -> Cell:
    """Seconds of the line `some` or `full` of a pressure file, as they add up."""
    if isinstance(text, Null):
        return text
    found = re.search(rf"^{kind} .*\btotal=(\d{{1,19}})$", text, re.MULTILINE)
    if found:
        return int(found[1]) / 1e6
    # the `full` line for cpu came with Linux 5.13
    said = re.search(r"^some .*\btotal=\d{1,19}$", text, re.MULTILINE)
    return Null(Reason.NOT_SUPPORTED, f"no {kind}") if said and kind == "full" else UNPARSABLE


def hexadecimal(text: str | Null) -> str:
    """`0x10de` -> `10de`; empty when it is nothing of the kind."""
    found = None if isinstance(text, Null) else re.fullmatch(r"0x([0-9a-f]{4,8})", text.strip().lower())
    return found[1] if found else ""


def word(path: Path, words: tuple[str, ...]) -> Cell:
    """A file that holds one of `words`."""
    text = read(path)
    if isinstance(text, Null):
        return text
    return text.strip() if text.strip() in words else UNPARSABLE


def number(text: str) -> float:
    """A finite number.

    Raises:
        ValueError: It is none.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def count(text: str) -> int:
    """A whole number of at most 19 digits.

    Raises:
        ValueError: It is none.
    """
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise ValueError(text)
    return int(text)


def link(path: Path) -> Cell:
    """Where a link points, by its last name; empty when there is none."""
    try:
        return os.readlink(path).rstrip("/").rpartition("/")[2]
    except FileNotFoundError:
        return ""
    except OSError as error:
        return why(error)


def brief(path: str) -> str | Null:
    """The text of a file of one line, in one read: for those of which there are hundreds."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return why(error)
    try:
        return os.read(file, 4096).decode(errors="replace")
    except OSError as error:
        return why(error)
    finally:
        os.close(file)


def real(path: Path) -> str:
    """Where a path leads in the end; itself when that cannot be said."""
    try:
        return os.path.realpath(path)
    except OSError:
        return str(path)
