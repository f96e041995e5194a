"""JSON texts of strangers: how deeply nested they are, before anything recursive reads them."""

import re

MAX_DEPTH = 64

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def is_shallow(text: str) -> bool:
    """Whether a text, if it is JSON, is nested at most `MAX_DEPTH` deep."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return True
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            return False
    return True
