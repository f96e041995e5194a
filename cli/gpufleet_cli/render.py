"""From documents to screens: ages, states, tables. The same rows piped or not."""

import csv
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import click

Json = Mapping[str, object]

STATES = ("ok", "degraded", "critical", "unknown")
_GLYPH = {"ok": "✔", "degraded": "▲", "critical": "✖", "unknown": "?", "crit": "✖", "warn": "▲"}
_ASCII = {"✔": "+", "▲": "!", "✖": "X", "×": "x", "–": "-"}
_COLOR = {
    "ok": "green",
    "degraded": "yellow",
    "critical": "red",
    "unknown": "magenta",
    "crit": "red",
    "warn": "yellow",
}
_WORD = {"unknown": "no data", "crit": "CRIT", "warn": "WARN"}
_UNBOUNDED = 1_000_000


@cache
def _ascii_only() -> bool:
    """Whether stdout cannot print the glyphs."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "✔▲✖×–".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def plain_if_needed(text: str) -> str:
    """`text` with the glyphs that stdout cannot print replaced."""
    if not _ascii_only():
        return text
    for glyph, letter in _ASCII.items():
        text = text.replace(glyph, letter)
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return text.encode(encoding, "replace").decode(encoding)


def width() -> int:
    """Columns to fold to: the terminal's, or COLUMNS when it is set; piped text is never folded."""
    if sys.stdout.isatty():
        return max(40, shutil.get_terminal_size((80, 24)).columns)
    columns = os.environ.get("COLUMNS", "")
    return max(40, int(columns)) if columns.isdigit() and int(columns) > 0 else _UNBOUNDED


def state(word: object, colored: bool = False) -> str:
    """`✖ critical`, `? no data`: glyph, word and colour."""
    name = str(word)
    return paint(f"{_GLYPH.get(name, '·')} {_WORD.get(name, name)}", name, colored)


def paint(text: str, name: str, colored: bool) -> str:
    """`text` in the colour of a state or severity."""
    return click.style(text, fg=_COLOR[name]) if colored and name in _COLOR else text


def plural(amount: int, word: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{amount} {word}" if amount == 1 else f"{amount} {word}s"


def entity_place(node: object, entity: object) -> str:
    """Where a finding is, for people: the node's own entities need no word beside its name."""
    return str(node) if entity in ("node:", "agent:") else f"{node} {entity}"


def age(seconds: object) -> str:
    """`5s`, `12m`, `3h`, `2d`; `never` for None: one number, one unit, rounded down."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return "never"
    left = max(0.0, float(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if left >= 2 * size or (unit == "m" and left >= size * 2):
            return f"{int(left // size)}{unit}"
    return f"{int(left)}s"


def clock(at: object) -> str:
    """`2026-11-30 09:42:18` of an ISO time."""
    return str(at).replace("T", " ").removesuffix("Z").partition(".")[0] if at else "-"


def number(value: object, digits: int = 0) -> str:
    """A number without thousands separators; `-` when it is not known."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return f"{value:.{digits}f}"


def brief(value: object) -> str:
    """A measured value with six digits at most."""
    return f"{value:.6g}" if isinstance(value, float) else text(value)


_UNITS = {"_mhz": "MHz", "_w": "W", "_c": "C", "_pct": "%"}
_NAMES = {"mem_available_bytes": "memory available", "pss_bytes": "memory"}


def measured(name: str, value: object) -> str:
    """A value for people, by the unit its name ends with: `uptime 38 d 16 h`, `swap used 2.0 GiB`."""
    for suffix, show in (("_bytes", _binary), ("_s", span)):
        if name.endswith(suffix) and isinstance(value, int | float):
            return f"{_NAMES.get(name, name.removesuffix(suffix).replace('_', ' '))} {show(float(value))}"
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return f"{_NAMES.get(name, name.removesuffix(suffix).replace('_', ' '))} {brief(value)} {unit}"
    return f"{name.replace('_', ' ')} {brief(value)}"


def _binary(amount: float) -> str:
    """Below 10,000 in bytes, for an MTU is 1500 or 9000."""
    if abs(amount) < 10_000:
        return f"{amount:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if abs(amount) < 1024:
            return f"{amount:.3g} {unit}"
    return f"{amount / 1024:.3g} TiB"


def span(seconds: float) -> str:
    """`38 d 16 h`, `16 h 5 min`, `5 min 20 s`, `0.25 s`."""
    for size, unit, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // part)} {small}"
    return f"{seconds:.3g} s"


def text(value: object) -> str:
    """One cell of a table; NULL stays NULL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value).replace("\n", "\\n").replace("\t", "\\t")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its header.
        right: Whether it is set to the right (numbers).
        fold: Whether long text folds to the terminal; the last column of a table usually does.
    """

    title: str
    right: bool = False
    fold: bool = False


MIN_COLUMN = 8
"""Columns below which a column without running text does not fold."""

MIN_FOLD = 32
"""Columns below which folded text gets lines of its own."""


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], limit: int, indent: str = ""
) -> list[str]:
    """Aligned lines with a header, folded to `limit`; nothing is cut.

    Where the last column would become too narrow to read, its text stands below its line instead. When that
    is not enough, the widest columns fold too.
    """
    widths = [
        max([_cells(column.title), *(_cells(row[n]) for row in rows)]) for n, column in enumerate(columns)
    ]
    room = limit - sum(widths[:-1]) - 2 * (len(columns) - 1) - len(indent)
    if columns[-1].fold and room < min(MIN_FOLD, widths[-1]):
        return _with_text_below(columns, rows, limit, indent)
    if columns[-1].fold:
        widths[-1] = min(widths[-1], room)
    return [line for block in _blocks(columns, rows, widths, limit, indent) for line in block]


def fits(columns: Sequence[Column], limit: int) -> bool:
    """Whether a table of these columns can be folded to `limit`."""
    return (MIN_COLUMN + 2) * len(columns) - 2 <= limit


def records(columns: Sequence[Column], rows: Sequence[Sequence[str]], limit: int) -> list[str]:
    """A line per cell, for rows that are too wide for a table."""
    size = max(_cells(column.title) for column in columns)
    lines: list[str] = []
    for at, row in enumerate(rows, 1):
        lines.append(f"- row {at}")
        for column, cell in zip(columns, row, strict=True):
            parts = _wrap(cell, max(MIN_COLUMN, limit - size - 2), break_words=True)
            lines.append(f"{column.title:<{size}}  {parts[0]}".rstrip())
            lines.extend(f"{'':<{size}}  {part}" for part in parts[1:])
    return lines


def _blocks(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: list[int], limit: int, indent: str
) -> list[list[str]]:
    """The lines of the header and of each row; the widest columns give way until all fit."""
    too_wide = sum(widths) + 2 * (len(columns) - 1) + len(indent) - limit
    while too_wide > 0 and max(widths) > MIN_COLUMN:
        widths[widths.index(max(widths))] -= 1
        too_wide -= 1
    blocks = []
    for row in [[column.title for column in columns], *rows]:
        folded = [_wrap(cell, widths[n], not columns[n].fold) for n, cell in enumerate(row)]
        lines = []
        for at in range(max(len(parts) for parts in folded)):
            cells = [parts[at] if at < len(parts) else "" for parts in folded]
            line = "  ".join(_pad(cell, widths[n], columns[n].right) for n, cell in enumerate(cells))
            lines.append((indent + line).rstrip())
        blocks.append(lines)
    return blocks


def _with_text_below(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], limit: int, indent: str
) -> list[str]:
    first, rest = columns[:-1], [row[:-1] for row in rows]
    widths = [
        max([_cells(column.title), *(_cells(row[n]) for row in rest)]) for n, column in enumerate(first)
    ]
    head, *body = _blocks(first, rest, widths, limit, indent)
    title = columns[-1].title
    if len(head[-1]) + 2 + len(title) <= limit:
        head[-1] += f"  {title}"
    else:
        head.append(f"{indent}    {title}")
    lines = head
    for block, row in zip(body, rows, strict=True):
        lines.extend(block)
        if row[-1]:
            lines.extend(wrap_line(f"{indent}    {row[-1]}", limit, f"{indent}    "))
    return lines


def _wrap(cell: str, columns: int, break_words: bool) -> list[str]:
    if _cells(cell) <= columns or click.unstyle(cell) != cell:
        return [cell]
    return textwrap.wrap(cell, columns, break_long_words=break_words, break_on_hyphens=break_words) or [""]


def _cells(value: str) -> int:
    """Cells on screen, without colour codes."""
    return len(click.unstyle(value))


def _pad(value: str, columns: int, right: bool) -> str:
    gap = " " * max(0, columns - _cells(value))
    return gap + value if right else value + gap


def wrap_line(value: str, limit: int, indent: str) -> list[str]:
    """A long line folded at spaces; what follows is indented."""
    return textwrap.wrap(
        value, limit, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """RFC 4180 with a header; NULL is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if cell is None else text_for_csv(cell) for cell in row])
    return out.getvalue()


def as_markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; NULL is an empty cell."""
    cells = [["" if cell is None else markdown(text_for_csv(cell)) for cell in row] for row in rows]
    lines = [list(columns), ["---"] * len(columns), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if columns else ""


_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~])")


def markdown(value: str) -> str:
    """Text that stays itself inside a line of Markdown."""
    return _MARKDOWN.sub(r"\\\1", " ".join(value.split()))


def text_for_csv(cell: object) -> str:
    """A cell of a CSV file: the text itself, JSON for what is not flat."""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, dict | list):
        return json.dumps(cell, ensure_ascii=False, separators=(",", ":"))
    return str(cell)


def as_json(document: object) -> str:
    """One document, indented; letters as they are."""
    return json.dumps(document, ensure_ascii=False, indent=2)


def as_jsonl(items: Iterable[object]) -> str:
    """One item per line."""
    return "".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) + "\n" for item in items)


def get(document: object, *path: str) -> object:
    """A value inside a document; None when any part of the path is absent."""
    for key in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(key)
    return document


def items(document: object, *path: str) -> list[Json]:
    """The objects of a list inside a document."""
    found = get(document, *path)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def count(document: object, *path: str) -> int:
    """A whole number inside a document; 0 when absent."""
    found = get(document, *path)
    return found if isinstance(found, int) else 0
