"""Read a TOML file into a msgspec struct. Bad input is one line: file, key, what to do."""

import contextlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)


class ConfigError(Exception):
    """The configuration cannot be used; the text names the file and the key."""


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the file's name before what is wrong with a value in it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def load(path: Path, kind: type[Struct]) -> Struct:
    """Read `path` as `kind`; a key that `kind` does not know is an error, not a warning.

    Raises:
        ConfigError: The file is missing, not TOML, or a key is wrong or unknown.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from error
    return parse(text, kind, str(path))


def parse(text: bytes, kind: type[Struct], name: str) -> Struct:
    """Like `load`, on bytes already read; `name` is how errors call them."""
    try:
        raw = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not valid TOML: {error}") from error
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {_plain(str(error))}") from error


def _plain(message: str) -> str:
    """`Object contains unknown field `evry` - at `$.push`` -> `unknown key push.evry: ...`."""
    what, _, where = message.partition(" - at ")
    where = where.strip("`").removeprefix("$").lstrip(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", what)
    if unknown:
        return f"unknown key {_join(where, unknown[1])}: remove it or correct its name"
    missing = re.fullmatch(r"Object missing required field `(.+)`", what)
    if missing:
        return f"key {_join(where, missing[1])}: is missing: add it"
    return f"key {where or '(top level)'}: {what}"


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
