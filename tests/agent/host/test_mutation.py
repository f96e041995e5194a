"""Trees of four hosts, mutilated at random: both probes answer with whole rows, whatever they find."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet_agent.drivers.sysfs import SysfsHost
from gpufleet_agent.probe import run_probe
from gpufleet_agent.probes import edac, host

HOSTS = ("hgx-h100", "cloud-vm", "workstation", "grace")


def mutilate(chance: random.Random, path: Path, junk: bytes) -> None:
    content = path.read_bytes()
    how = chance.randrange(7)
    path.unlink()
    if how == 0:
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif how == 1:
        path.write_bytes(junk)
    elif how == 2:
        path.mkdir()
    elif how == 3:
        path.write_bytes(content.replace(b"1", junk))
    elif how == 4:
        path.symlink_to(path)
    elif how == 5:
        path.write_bytes(content.replace(b"0", b"99999999999999999999"))


@pytest.mark.slow
@given(name=st.sampled_from(HOSTS), seed=st.integers(0, 2**32), junk=st.binary(max_size=80))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mutilated_tree_raises(tree: Callable[[str], Path], name: str, seed: int, junk: bytes) -> None:
    chance = random.Random(seed)
    root = tree(name)
    try:
        found = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        for path in chance.sample(found, min(25, len(found) // 2)):
            mutilate(chance, path, junk)
        one = SysfsHost(root)
        for probe, module in {"host": host, "edac": edac}.items():
            for _ in range(2):
                sweep = run_probe(probe, module, one, pytest.fail)
                assert sweep.error == ""
                if probe == "host":
                    assert [len(row) for row in sweep.rows] == [len(host.METRICS)]
        attributes = one.node().attributes
        texts = [
            *attributes.values(),
            *(str(cell) for item in one.rows("dimm_item") for cell in item.values()),
        ]
        assert all(text.isprintable() and len(text) <= 600 for text in texts)
    finally:
        shutil.rmtree(root)
