"""Columns on their way into a table: NumPy arrays and texts become one INSERT.

Texts travel as numbers of one word list that DuckDB splits once; NULLs as a validity column beside the data,
because 1.5 loses NumPy masks and reads object arrays thousands of times slower than numbers.
"""

from collections.abc import Sequence
from typing import TypeAlias

import duckdb
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]
Number: TypeAlias = npt.NDArray[np.float64 | np.int64 | np.uint64 | np.uint8 | np.uint32]
Mask: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]
Codes: TypeAlias = npt.NDArray[np.uint32]

NULL_CODE = 0
"""The number of no word."""


class Words:
    """Every text of one INSERT, once, numbered from 1."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def code(self, text: str | None) -> int:
        """The number of `text`; NULL_CODE of None."""
        if text is None:
            return NULL_CODE
        return self._codes.setdefault(text, len(self._codes) + 1)

    def codes(self, texts: Sequence[str | None]) -> Codes:
        """One number per text."""
        return np.fromiter(map(self.code, texts), np.uint32, len(texts))

    def joined(self) -> str:
        """What `string_split(..., chr(0))` takes apart again."""
        text = "\0".join(self._codes)
        if text.count("\0") == len(self._codes) - 1:
            return text
        return "\0".join(word.replace("\0", "\ufffd") for word in self._codes)


class Frame:
    """Rows of one table. Add every column, then `insert`."""

    def __init__(self, words: Words | None = None) -> None:
        self.words = words or Words()
        self._arrays: dict[str, Array] = {}
        self._names: list[str] = []
        self._select: list[str] = []

    def numbers(self, name: str, values: Array, valid: Mask | None = None) -> None:
        """A column of numbers or truth values, NULL where `valid` is false."""
        self._add(name, values, f"c{len(self._names)}", valid)

    def times(self, name: str, micros: Array, valid: Mask | None = None) -> None:
        """A TIMESTAMP column from microseconds since the epoch, UTC."""
        self._add(name, micros, f"make_timestamp(c{len(self._names)})", valid)

    def texts(self, name: str, texts: Sequence[str | None]) -> None:
        """A VARCHAR column."""
        self.codes(name, self.words.codes(texts))

    def codes(self, name: str, codes: Array) -> None:
        """A VARCHAR column from numbers of `words`."""
        self._add(name, codes, f"l[c{len(self._names)}]", None)

    def json(self, name: str, texts: Sequence[str | None]) -> None:
        """A JSON column; what is not JSON becomes NULL."""
        self._add(name, self.words.codes(texts), f"TRY_CAST(l[c{len(self._names)}] AS JSON)", None)

    def _add(self, name: str, values: Array, expression: str, valid: Mask | None) -> None:
        index = len(self._names)
        self._arrays[f"c{index}"] = values
        if valid is not None:
            self._arrays[f"v{index}"] = valid
            expression = f"CASE WHEN v{index} THEN {expression} END"
        self._names.append(f'"{name}"')
        self._select.append(expression)

    def insert(self, write: duckdb.DuckDBPyConnection, table: str) -> None:
        """Append the rows to `table` (already quoted); inside `Store.transaction()`."""
        write.register("frame", self._arrays)  # part of the transaction: a rollback takes it back
        write.execute(
            f"INSERT INTO {table} ({', '.join(self._names)}) SELECT {', '.join(self._select)} "
            "FROM frame, (SELECT string_split(?, chr(0)) AS l)",
            [self.words.joined()],
        )
        write.unregister("frame")
