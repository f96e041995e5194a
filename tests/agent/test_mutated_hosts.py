"""Whole hosts whose files are damaged in every way: no probe raises, and what is well goes on being read."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import PROBES

HOSTS = ("hgx-h100", "cloud-vm", "workstation", "grace", "amd-mi210")
KEPT = "sys/bus/pci/devices"
"""Without its list of devices nothing can be said of the bus: that is an error of the probe, not a row."""


def _binary(chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 7, 300)))


def damage(path: Path, chance: random.Random) -> None:
    """Make one file missing, empty, cut, binary, long, of another kind, or a link to nowhere or itself."""
    was = b"" if path.is_symlink() or path.is_dir() else path.read_bytes()
    kind = chance.randrange(10)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == 1:
        path.write_bytes(b"")
    elif kind == 2:
        path.write_bytes(was[: chance.randrange(len(was) + 1)])
    elif kind == 3:
        path.write_bytes(_binary(chance))
    elif kind == 4:
        at = chance.randrange(len(was) + 1)
        path.write_bytes(was[:at] + _binary(chance) + was[at:])
    elif kind == 5:
        path.mkdir()
    elif kind == 6:
        path.symlink_to("nowhere")
    elif kind == 7:
        path.symlink_to(path.name)
    elif kind == 8:
        path.write_bytes(
            chance.choice((b"-1\n", b"99999999999999999999999\n", b"nan\n", b"0x\n", b"1e999\n"))
        )
    elif kind == 9:
        path.write_bytes(was * chance.choice((2, 50)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", HOSTS)
def test_ten_thousand_damages_raise_nothing(tree: Callable[[str], Path], name: str) -> None:
    whole = tree(name)
    chance = random.Random(name)
    damages = 0
    while damages < 2000:
        root = whole.parent / f"{name}-damaged"
        shutil.copytree(whole, root, symlinks=True)
        paths = [
            Path(folder, entry)
            for folder, folders, files in os.walk(root)
            for entry in (*folders, *files)
            if not KEPT.startswith(str(Path(folder, entry).relative_to(root)))
        ]
        host = SysfsHost(root)
        for path in chance.sample(paths, 100):
            if os.path.lexists(path):  # it went with its folder
                damage(path, chance)
                damages += 1
            if damages % 10 == 0:
                read_all(host)
        read_all(SysfsHost(root))
        shutil.rmtree(root)


def read_all(host: SysfsHost) -> None:
    """Every probe and the inventory's items; a failure is a word of the driver's, never an exception."""
    for name, probe in PROBES.items():
        sweep = run_probe(name, probe, host, pytest.fail)
        assert sweep.error in ("", "no_library", "no_sysfs") or sweep.error.isupper(), (name, sweep.error)
    host.node()
    for group in ("dimm_item", "disk_item", "mount_item"):
        list(host.rows(group))
