from collections.abc import Callable
from pathlib import Path

import pytest


class Clock:
    """Monotonic seconds, set by the test."""

    def __init__(self) -> None:
        self.t = 1000.0

    def __call__(self) -> float:
        return self.t


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """A file below the made root, which is `tmp_path`."""

    def one(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return one


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Make opening one file, or all below a folder, fail with an errno: root may read everything."""
    refused: dict[str, int] = {}
    opened = Path.open

    def refusing(path: Path, *args: object, **more: object) -> object:
        for name, number in refused.items():
            if str(path) == name or str(path).startswith(name + "/"):
                raise OSError(number, "refused by the test", str(path))
        return opened(path, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refusing)

    def add(path: Path, number: int) -> None:
        refused[str(path)] = number

    return add
