import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CFLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-fvisibility=hidden")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a libnvidia-ml.so.1 of a new and of an old driver."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler, and CI must run these tests")
        pytest.skip("no C compiler")
    found: dict[str, Path] = {}
    for name, more in (("new", ()), ("old", ("-DOLD_DRIVER",))):
        found[name] = tmp_path_factory.mktemp(name)
        target = found[name] / "libnvidia-ml.so.1"
        command = [compiler, *CFLAGS, *more, "-Wl,-soname,libnvidia-ml.so.1", "-o", str(target)]
        subprocess.run([*command, str(HERE / "fake_nvml.c")], check=True, timeout=60)
    return found


class Reader:
    """A process that reads the fake's cards; `say` changes what they answer while it runs."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.word_file = root / "word"
        self.state = root / "state"
        self.state.write_text("")
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"), str(root), str(self.word_file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "FAKE_NVML": str(self.state), **environment},
        )  # fmt: skip

    def say(self, *lines: str) -> None:
        new = self.state.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.state)

    def send(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def ask(self, do: str, index: int = 0, group: str = "gpu") -> object:
        self.send(do=do, index=index, group=group)
        return self.receive()

    def word(self) -> str:
        """What the process was doing when it was last heard of."""
        return self.word_file.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(90)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue


@pytest.fixture
def reader(tmp_path: Path, libraries: dict[str, Path]) -> Iterator[Callable[..., Reader]]:
    """Start a reader of two cards; `reader("")` finds no library."""
    started: list[Reader] = []

    def start(library: str = "new", inject: bool = False) -> Reader:
        root = tmp_path / str(len(started))
        for slot in range(2):
            device = root / f"sys/bus/pci/devices/0000:{slot + 16:02x}:00.0"
            device.mkdir(parents=True)
            for name, text in (("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200")):
                (device / name).write_text(f"{text}\n")
            (device / "config").write_bytes(b"\xde\x10\x30\x23")
        (root / "proc/4711").mkdir(parents=True)
        place = str(libraries[library]) if library else str(root)
        environment = {"FAKE_INJECT": f"{place}/libnvidia-ml.so.1"} if inject else {"LD_LIBRARY_PATH": place}
        started.append(Reader(root, environment))
        return started[-1]

    yield start
    for one in started:
        one.close()
