"""Processes that benches start and must not leave behind."""

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")
