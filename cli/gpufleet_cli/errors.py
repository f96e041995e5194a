"""What can go wrong at the prompt, with the exit code that says so. One list for all verbs."""

OK = 0
INTERNAL = 1
BAD = 1
"""What was to be tried turned out bad: `fleet demo --check`, `fleet bench run`."""
USAGE = 2
UNREACHABLE = 3
AUTH = 4
NOT_FOUND = 5
REFUSED = 6
DEGRADED = 10
CRITICAL = 11
NO_DATA = 12
INTERRUPTED = 130


class FleetError(Exception):
    """An error that people read.

    Attributes:
        code: A snake_case word for programs.
        message: What happened.
        hint: What to do next; may be empty.
        exit_code: One of the numbers above.
    """

    def __init__(self, code: str, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
