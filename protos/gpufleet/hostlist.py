"""Names of hosts as people write them: `gpu-[001-003,007],login`."""

import re
from collections.abc import Iterable, Sequence

_TAIL = re.compile(r"^(.*?)(\d+)$")


def fold(names: Iterable[str]) -> str:
    """`gpu-[001-003,007],login`: consecutive numbers of one width and prefix are folded."""
    groups: dict[tuple[str, int], list[int]] = {}
    whole: list[str] = []
    for name in sorted(set(names)):
        match = _TAIL.match(name)
        if match:
            groups.setdefault((match[1], len(match[2])), []).append(int(match[2]))
        else:
            whole.append(name)
    parts = [_fold(prefix, digits, sorted(numbers)) for (prefix, digits), numbers in groups.items()]
    return ",".join(sorted(parts + whole))


def shorten(names: Sequence[str], letters: int = 200) -> str:
    """`fold` for one line of text; of a list that is longer only the beginning and how many there are."""
    text = fold(names)
    if len(text) <= letters:
        return text
    return f"{text[:letters]}... ({len(set(names))} names)"


def _fold(prefix: str, digits: int, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{digits}}"
    runs: list[tuple[int, int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    texts = [f"{a:0{digits}}" if a == b else f"{a:0{digits}}-{b:0{digits}}" for a, b in runs]
    return f"{prefix}[{','.join(texts)}]"
