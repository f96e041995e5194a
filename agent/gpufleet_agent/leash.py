"""How a program of somebody else's is started so that it ends with us, also when we are killed."""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_START = (
    "import ctypes, os, resource, sys\n"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})\n"
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "try: os.execv(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'cannot be run: {error.strerror}')\n"
)
"""Between fork and exec Python must not do it."""


def leashed(program: str, *arguments: str) -> list[str]:
    """The command that starts `program`, an absolute path; it dies with the thread that starts it."""
    return [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), program, *arguments]
