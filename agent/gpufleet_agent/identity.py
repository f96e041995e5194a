"""Which host this is, read without any driver: what the agent says of itself in its hello."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from gpufleet_agent.config import AgentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which host this is.

    Attributes:
        node: The name people type.
        machine_id: Empty when there is none.
        boot_id: Of the running boot.
    """

    node: str
    machine_id: str
    boot_id: str


def identify(config: AgentConfig) -> Identity:
    """Read it from /etc and /proc. A simulated host has a machine id of its own, made of its name."""
    root = Path(config.root)
    machine_id = _line(root / "etc/machine-id") or _line(root / "var/lib/dbus/machine-id")
    if config.driver == "simulated":
        text = f"{config.simulated.scenario}\n{config.node_in_scenario}"
        machine_id = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    boot_id = _line(root / "proc/sys/kernel/random/boot_id")
    return Identity(node=config.node_name, machine_id=machine_id, boot_id=boot_id)


def _line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(256).decode("ascii", "replace").strip()
    except OSError:
        return ""
