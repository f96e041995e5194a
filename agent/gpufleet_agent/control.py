"""`agent.sock`: by it `fleet-agent release | resume` reach the running agent of this host.

Three words and nothing else: release (with seconds), resume, status; one line each way. The file's mode lets
in root and the agent's own user alone.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

log = logging.getLogger(__name__)

NAME = "agent.sock"
RELEASE_S = 1800.0
LEAST_S, MOST_S = 1.0, 86400.0
"""A driver that is left alone for longer is better served by an agent that is stopped."""

_LINE_BYTES = 256
_READ_S = 5.0
_ANSWER_S = 30.0

Answer = dict[str, str | float | bool]


class ControlError(Exception):
    """No agent answers there, or not in time; one line for people."""


class Control:
    """The agent's end.

    Args:
        path: Where the socket is made.
        release: Lets go of the driver for so many seconds; answers what still holds it.
        resume: Takes it back; whether it was released.
        status: What there is to say.
    """

    def __init__(
        self,
        path: Path,
        release: Callable[[float], Awaitable[list[int]]],
        resume: Callable[[], bool],
        status: Callable[[], Answer],
    ) -> None:
        self._path = path
        self._release = release
        self._resume = resume
        self._status = status
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. Where that cannot be, the agent goes on without."""
        try:
            if _answers(self._path):
                log.warning("%s: another agent listens there: release and resume go to it", self._path)
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                listening.bind(str(self._path))
            finally:
                os.umask(before)
            self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=_LINE_BYTES)
        except OSError as error:
            log.warning("%s: cannot listen, so release and resume do not work: %s", self._path, error)

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_S):
                line = await reader.readline()
            answer = await self._obey(line.decode("utf-8", "replace").split())
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            log.debug("request on %s dropped: %s", self._path, error)
        finally:
            writer.close()

    async def _obey(self, words: list[str]) -> Answer:
        match words:
            case ["release", text]:
                for_s = seconds(text)
                if for_s is None:
                    return {"ok": False, "error": f"{text:.20}: give {LEAST_S:g} to {MOST_S:g} seconds"}
                holders = await self._release(for_s)
                said = f"process {', '.join(map(str, holders))} is stuck in the driver and holds it still"
                return {"ok": not holders, "error": said if holders else "", **self._status()}
            case ["resume"]:
                self._resume()
                return {"ok": True, "error": "", **self._status()}
            case ["status"]:
                return {"ok": True, "error": "", **self._status()}
        return {"ok": False, "error": "use release SECONDS, resume or status"}


def ask(path: Path, request: str) -> Answer:
    """Send one request to the agent that listens at `path`.

    Raises:
        ControlError: Nobody answers.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_ANSWER_S)
            client.connect(str(path))
            client.sendall(request.encode() + b"\n")
            with client.makefile("rb") as answers:
                found = json.loads(answers.readline(65536))
    except (OSError, ValueError) as error:
        raise ControlError(f"{path}: no agent answers ({error})") from error
    if not isinstance(found, dict):
        raise ControlError(f"{path}: no answer of ours")
    return found


def seconds(text: str) -> float | None:
    """`90`, `90s`, `30m` or `2h` in seconds; None when it is none of these or out of bounds."""
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    try:
        value = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        return None
    return value if LEAST_S <= value <= MOST_S else None


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
