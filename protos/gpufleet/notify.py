"""Tell systemd how we are: READY, STATUS, WATCHDOG. Six lines of socket; no library is needed."""

import os
import socket


class Notifier:
    """Speaks sd_notify(3) when systemd asked for it, and is silent otherwise.

    The socket's address is taken out of the environment at once, so that no child inherits it.
    """

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        usec = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        for_us = usec.isdigit() and int(usec) > 0 and pid in ("", str(os.getpid()))
        self.watchdog_s: float | None = int(usec) / 3e6 if for_us else None
        """Seconds between pings (a third of WATCHDOG_USEC); None = systemd wants none."""

    def send(self, text: str) -> None:
        """Send `READY=1`, `STATUS=...`, `WATCHDOG=1` or `STOPPING=1`; never raises."""
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
                to.setblocking(False)  # a systemd too busy to listen must not stop us
                to.connect(address)
                to.sendall(text.encode())
        except OSError:
            pass  # systemd restarts us if it misses us; there is nobody else to tell
