"""`-w` repeats until it is ended."""

import os
import subprocess
import sys
from typing import Protocol

import pytest


class Address(Protocol):
    address: str


@pytest.mark.parametrize("verb", [("sql", "select 42 as answer"), ("status",)])
def test_watch_repeats(served: Address, verb: tuple[str, ...]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "gpufleet_cli.main", "-w", "-o", "json", *verb],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "GPUFLEET_SERVER": served.address},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        first, second = child.stdout.readline(), child.stdout.readline()
    finally:
        child.kill()
        child.communicate()
    assert first.startswith('{"api_version"')
    assert second.startswith('{"api_version"')
