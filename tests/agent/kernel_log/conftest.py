from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpufleet.catalogue import Catalogue
from gpufleet.event import Event
from gpufleet_agent.drivers.kmsg import FROM_BOOT, KernelLog
from gpufleet_agent.kernel_log import Now

WALL_US = 1_772_359_200_000_000  # 2026-03-01T10:00:00Z
UPTIME_S = 7200.0


def nothing(pci: str) -> str:
    return ""


@dataclass
class Machine:
    """A host whose kernel log is a file in the format of /dev/kmsg, and whose clocks are ours."""

    root: Path
    boot_id: str = "b2"
    seq: int = 0
    uptime_s: float = UPTIME_S
    suspended_s: float = 0.0
    wall_us: int = WALL_US
    uuid_of: Callable[[str], str] = nothing
    words: Catalogue | None = None
    opened: list[KernelLog] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "dev").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
        (self.root / "dev/kmsg").touch()
        self.boot(self.boot_id)

    @property
    def kmsg(self) -> Path:
        return self.root / "dev/kmsg"

    def boot(self, boot_id: str) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"{boot_id}\n")
        self.kmsg.unlink()
        self.kmsg.touch()
        self.seq = 0

    def write(
        self, *texts: str, at_s: float | None = None, facility: int = 0, seq: int | None = None
    ) -> None:
        """Print lines as the kernel does: escaped, numbered, stamped."""
        stamp = round((self.uptime_s if at_s is None else at_s) * 1e6)
        with self.kmsg.open("ab") as log:
            for text in texts:
                self.seq = self.seq if seq is None else seq
                raw = b"".join(
                    bytes((byte,)) if 32 <= byte < 127 and byte != 92 else b"\\x%02x" % byte
                    for byte in text.encode("utf-8", "surrogateescape")
                )
                log.write(b"%d,%d,%d,-;%s\n" % (facility << 3 | 4, self.seq, stamp, raw))
                self.seq += 1

    def sleep(self, seconds: float) -> None:
        self.uptime_s += seconds
        self.wall_us += round(seconds * 1e6)

    def now(self) -> Now:
        kernel_us = round(self.uptime_s * 1e6)
        return Now(self.wall_us, kernel_us + round(self.suspended_s * 1e6), kernel_us)

    def open(self) -> KernelLog:
        """A reader in a new process: it knows nothing but the cursor it will be given."""
        log = KernelLog(self.root, words=self.words, uuid_of=self.uuid_of, clock=self.now)
        self.opened.append(log)
        return log

    def events(self, *texts: str) -> list[Event]:
        """All that these lines become, folded remainders and held lines too."""
        self.write(*texts)
        log = self.open()
        events, cursor = log.read(FROM_BOOT)
        self.sleep(120)
        rest, _ = log.read(cursor)
        return [*events, *rest]


@pytest.fixture
def machine(tmp_path: Path) -> Iterable[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for log in machine.opened:
        log.close()
