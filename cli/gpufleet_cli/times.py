"""Times as people type them: `90s`, `2h`, `30d`, or ISO 8601 in UTC."""

import re
from datetime import UTC, datetime, timedelta

import click

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class _Span(click.ParamType[float]):
    """Seconds of `2h`."""

    name = "span"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])", str(value))
        seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if not 0 < seconds <= 3660 * 86400:
            self.fail(f"{str(value)!r:.40} is no time: write 90s, 30m, 2h or 7d", param, ctx)
        return seconds


class _Moment(click.ParamType[datetime]):
    """A moment, naive UTC: `2h` ago, or a date."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """The moment."""
        if isinstance(value, datetime):
            return value
        text = str(value)
        if re.fullmatch(r"[\d.]+[smhdw]", text):
            return datetime.now(UTC).replace(tzinfo=None) - timedelta(seconds=SPAN.convert(text, param, ctx))
        try:
            found = datetime.fromisoformat(text)
            return found.astimezone(UTC).replace(tzinfo=None) if found.tzinfo else found
        except (ValueError, OverflowError):
            self.fail(f"{text!r:.40} is no time: write 2h, 30d or 2026-11-30T02:10", param, ctx)


SPAN = _Span()
MOMENT = _Moment()
