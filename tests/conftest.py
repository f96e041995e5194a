"""What every test shares: hosts written as text, and hypothesis without deadlines: timings fail no test."""

import ctypes
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

# a shell that starts us in the background lets us ignore Ctrl-C, and our children with us: they shall not
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("gpufleet", deadline=None)
settings.load_profile("gpufleet")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the slow tests over the first half: at the end one worker has them, and the others nothing."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    rest = [item for item in items if not item.get_closest_marker("slow")]
    order = [(float(at), item) for at, item in enumerate(rest)]
    order += [(at * len(rest) / len(slow) / 2 - 0.5, item) for at, item in enumerate(slow)]
    items[:] = [item for _, item in sorted(order, key=lambda placed: placed[0])]


HOSTS = Path(__file__).parent / "fixtures" / "hosts"


def _metrics(layout: int, content: int, size: int, fields: list[str]) -> bytes:
    """A gpu_metrics table: what the firmware does not fill reads all ones."""
    table = bytearray(b"\xff" * size)
    struct.pack_into("<HBB", table, 0, size, layout, content)
    for field in fields:
        place, _, value = field.partition("=")
        struct.pack_into("<Q", table, int(place), int(value))
    return bytes(table)


def grow(text: str, root: Path) -> Path:
    """Make the files of a tree below `root`.

    `[folder]`, then a line per file: `name = text` (\\n = a further line), `name -> path from the root`,
    `name hex bytes` or `name metrics revision content size place=value ...` (a gpu_metrics table); or
    `name <<END` and its lines as they are, up to a line END.
    """
    folder = root
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            folder = root / line.strip("[]")
            folder.mkdir(parents=True, exist_ok=True)
            continue
        name, kind, rest = (line + " ").split(" ", 2)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        words = rest.split()
        if kind == "->":
            path.symlink_to(os.path.relpath(root / rest.strip(), path.parent))
        elif kind == "hex":
            path.write_bytes(bytes.fromhex(rest))
        elif kind == "metrics":
            path.write_bytes(_metrics(int(words[0]), int(words[1]), int(words[2]), words[3:]))
        elif kind == "=":
            path.write_text(rest.strip().replace("\\n", "\n") + "\n")
        elif kind.startswith("<<"):
            path.write_text("".join(f"{inner}\n" for inner in iter(lambda: next(lines), kind[2:])))
        else:
            raise ValueError(line)
    return root


@pytest.fixture
def tree() -> Iterator[Callable[[str], Path]]:
    """The root of a host of tests/fixtures/hosts; in memory, as sysfs is, where that can be had."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:

        def plant(name: str) -> Path:
            root = Path(folder) / name
            for part in sorted((HOSTS / name).glob("*.txt")) if not root.exists() else ():
                grow(part.read_text(), root)
            return root

        yield plant


@pytest.fixture
def bound_by_modes() -> Iterator[None]:
    """The modes of files hold for this thread, and for those that it starts, also where root runs the tests.

    It gives up the two capabilities that let root read and write everywhere, and takes them back afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    was = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    assert libc.capget(head, was) == 0, os.strerror(ctypes.get_errno())
    less = (ctypes.c_uint32 * 6)(*was)
    less[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(head, less) == 0, os.strerror(ctypes.get_errno())
    yield
    assert libc.capset(head, was) == 0, os.strerror(ctypes.get_errno())
