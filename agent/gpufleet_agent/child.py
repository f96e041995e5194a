"""One child process as the supervisor sees it: exec'd, heard through a pipe, watched by its progress word.

Nothing here waits: a child that is stuck in the kernel cannot be killed, and must not be waited for. Its
end is seen through a pidfd by the event loop.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from gpufleet_agent.pipe import Command, Frames, Message, PipeError
from gpufleet_agent.progress import ProgressView, new_memory

log = logging.getLogger(__name__)

_READ = 1 << 16


def module_command(module: str) -> tuple[str, ...]:
    """How to run one of our modules: exec'd, never by fork alone, which gRPC's threads do not survive."""
    return (sys.executable, "-P", "-m", module)


class Child:
    """A running child. `start` makes one.

    Attributes:
        pid: Its process.
        started: time.monotonic() when it was started.
        code: Its exit status once it ended (negative = signal); None while it runs.
        progress: Its progress word.
        broken: Why it is of no use any more, as when what it sent could not be read; empty = it is.
        heard: time.monotonic() when it last sent something, or was started.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        progress: ProgressView,
        deliver: Callable[[Message], None],
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self.started = self.heard = time.monotonic()
        self.code: int | None = None
        self.progress = progress
        self.broken = ""
        self._process = process
        self._deliver = deliver
        self._frames = Frames()
        self._commands = process.stdin.fileno()
        self._out = process.stdout.fileno()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._deaf = False
        self._killed = False
        os.set_blocking(self._out, False)
        os.set_blocking(self._commands, False)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._out, self._hear)
        self._loop.add_reader(self._pidfd, self._reap)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        settings: Callable[[int], msgspec.Struct],
        deliver: Callable[[Message], None],
        note: bytes = b"",
    ) -> "Child":
        """Start `command` with its settings as JSON; `settings` is given the descriptor of its progress word.

        `note` is for `progress.read_note`.

        Raises:
            OSError: The system cannot start a process now.
        """
        memory = new_memory(note)
        try:
            process = subprocess.Popen(
                [*command, msgspec.json.encode(settings(memory)).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(memory,),
                bufsize=0,
            )
            progress = ProgressView(memory)
        finally:
            os.close(memory)
        return cls(process, progress, deliver)

    def tell(self, command: Command) -> bool:
        """Send a command; False when the child takes none."""
        try:
            os.write(self._commands, msgspec.json.encode(command) + b"\n")
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """Close its commands: it ends by itself, unless it is stuck. What it still sends is heard."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            stdin.close()

    def abandon(self) -> None:
        """Hear no more of it; it ends by itself if it can."""
        self._stop_hearing()
        self.leave()

    def kill(self) -> None:
        """Send SIGKILL, once. Whether it dies of it is seen by `code`."""
        if self.code is None and not self._killed:
            self._killed = True
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        """Whether it ends within `timeout_s`."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _hear(self) -> bool:
        """Take a bounded piece of what is in the pipe, so that the loop goes on; False = there was none."""
        try:
            data = os.read(self._out, _READ)
            self.heard = time.monotonic()
            for message in self._frames.feed(data):
                self._deliver(message)
        except BlockingIOError:
            return False
        except (OSError, PipeError) as error:
            self.broken = str(error)
            data = b""
        if not data:
            self._stop_hearing()
        return bool(data)

    def _reap(self) -> None:
        code = self._process.poll()
        if code is None:
            return
        while not self._deaf and self._hear():
            pass  # what it sent before it ended is still in the pipe
        self._stop_hearing()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.leave()
        self.code = code
        self._ended.set()

    def _stop_hearing(self) -> None:
        if not self._deaf:
            self._deaf = True
            self._loop.remove_reader(self._out)
            if self._process.stdout is not None:
                self._process.stdout.close()
