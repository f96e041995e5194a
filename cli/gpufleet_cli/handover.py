"""The report of a shift, as a screen and as Markdown; from the document of `ReportIncidents`."""

from collections.abc import Callable, Iterator, Sequence

from gpufleet_cli import render
from gpufleet_cli.render import Json, clock

Chapter = tuple[str, list[str]]
"""A heading and its lines."""

_COUNTS = (
    ("still_open", "still open"), ("opened", "opened"), ("closed", "closed"),
    ("acknowledged", "acknowledged"), ("silenced", "silenced"), ("maintenance", "in maintenance"),
)  # fmt: skip


def screen(document: Json, limit: int, colored: bool) -> str:
    """For a terminal: a line per thing, what belongs to it below it."""
    lines = render.wrap_line(_head(document), limit, "  ")
    for title, entries in _chapters(document, lambda word: render.state(word, colored), lambda text: text):
        lines += ["", title]
        for entry in entries:
            indent = " " * (len(entry) - len(entry.lstrip(" ")) + 2)
            lines.extend(render.wrap_line(f"  {entry}", limit, f"  {indent}"))
    return "\n".join(lines)


def markdown(document: Json) -> str:
    """For a page or a chat: headings and lists."""
    lines = ["# Fleet hand-over", "", _head(document)]
    for title, entries in _chapters(document, lambda word: f"**{word}**", render.markdown):
        lines += ["", f"## {title.capitalize()}", ""]
        lines += [f"{entry[: len(entry) - len(entry.lstrip(' '))]}- {entry.lstrip(' ')}" for entry in entries]
    return "\n".join(lines) + "\n"


def _head(document: Json) -> str:
    counts = ", ".join(f"{render.count(document, 'counts', key)} {word}" for key, word in _COUNTS)
    whole = "" if document.get("complete") else "; more than fit here: ask for a shorter time"
    return f"{clock(document.get('since'))} to {clock(document.get('generated_at'))} UTC: {counts}{whole}"


def _chapters(
    document: Json, severity: Callable[[object], str], plain: Callable[[str], str]
) -> Iterator[Chapter]:
    items = render.items(document, "items")
    groups: Sequence[tuple[str, Callable[[Json], bool]]] = (
        ("STILL OPEN", lambda item: item.get("state") == "open"),
        ("CLOSED", lambda item: bool(item.get("closed_since"))),
        ("ALSO NOTED", lambda item: item.get("state") != "open" and not item.get("closed_since")),
    )
    for title, belongs in groups:
        lines = [line for item in items if belongs(item) for line in _incident(item, severity, plain)]
        if lines:
            yield title, lines
    silences = [
        plain(
            f"{item.get('silence')} {item.get('matcher')}: {item.get('reason')} ({by(item)}, {_ends(item)})"
        )
        for item in render.items(document, "silences")
    ]
    windows = [
        plain(
            f"{item.get('maintenance')} {item.get('names')}: {item.get('reason')} ({by(item)}, {_ends(item)})"
        )
        for item in render.items(document, "maintenance")
    ]
    done = [
        plain(f"{clock(item.get('logged_at'))} {item.get('by')}: {item.get('verb')} {item.get('target')}"
        + _because(item))
        for item in render.items(document, "done")
    ]  # fmt: skip
    for title, lines in (("SILENCES", silences), ("MAINTENANCE", windows), ("DONE BY PEOPLE", done)):
        if lines:
            yield title, lines


def _incident(item: Json, severity: Callable[[object], str], plain: Callable[[str], str]) -> list[str]:
    """What and where, why it ended, and what people did with it."""
    place = str(item.get("place") or item.get("node"))
    what = ": ".join(str(part) for part in (item.get("headline"), item.get("reason")) if part)
    news = "new" if item.get("opened_since") else f"since {clock(item.get('opened_at'))}"
    flags = flags_of(item)
    head = plain(f"{place} {what} ({', '.join([news, *([flags] if flags else [])])})")
    lines = [f"{item.get('id')} {severity(item.get('severity'))} {head}"]
    if item.get("cause"):
        lines.append("  " + plain(f"{clock(item.get('resolved_at'))} resolved: {item.get('cause')}"))
    lines += [
        "  " + plain(f"{clock(entry.get('logged_at'))} {entry.get('what')} by {by(entry)}{_text(entry)}")
        for entry in render.items(item, "acts")
        if entry.get("what") != "closed"
    ]
    return lines


def flags_of(item: Json) -> str:
    """`acknowledged by ana, silenced`; empty for what nobody knows of."""
    flags = item.get("flags")
    words = [str(flag) for flag in flags] if isinstance(flags, list) else []
    ack = item.get("acknowledged")
    who = f"acknowledged by {ack.get('by')}" if isinstance(ack, dict) else "acknowledged"
    return ", ".join(who if word == "acknowledged" else word for word in words)


def by(item: Json) -> str:
    """Who did it; where no certificate said so, that it is what they said."""
    return f"{item.get('by')}{' (claimed)' if item.get('claimed') else ''}"


def _ends(item: Json) -> str:
    if item.get("ended_at"):
        return f"ended {clock(item.get('ended_at'))} by {item.get('ended_by')}"
    return f"until {clock(item.get('until'))}"


def _because(item: Json) -> str:
    told = render.get(item, "detail", "text") or render.get(item, "detail", "reason")
    denied = "" if item.get("result") == "ok" else f" [{item.get('result')}]"
    return (f": {told}" if told else "") + denied


def _text(entry: Json) -> str:
    return f": {entry['text']}" if entry.get("text") else ""
