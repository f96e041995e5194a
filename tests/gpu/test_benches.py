"""What benches measure on a real card, beside what its model is known for."""

import csv
import io
from pathlib import Path

import pytest

from gpufleet_agent.benches import BENCHES
from gpufleet_agent.drivers import Gpu
from gpufleet_agent.drivers.nvml import NvmlHost
from gpufleet_agent.measure import Place

MEASURED = """model,h2d,hbm
NVIDIA H200,55.4,
NVIDIA H100 80GB HBM3,54.8,2570
NVIDIA A100-SXM4-80GB,25.9,
NVIDIA A100-SXM4-40GB,25.9,
"""
"""GB/s of good cards, read and written both counted in memory, by published measurements."""


def cards() -> list[tuple[NvmlHost, Gpu]]:
    host = NvmlHost(Path("/"))
    return [(host, gpu) for gpu in host.gpus()]


def measure(host: NvmlHost, gpu: Gpu, name: str) -> float:
    found = BENCHES[name].run(Place(host, gpu, "/tmp"), BENCHES[name].PARAMS)
    assert isinstance(found, tuple)
    result, _ = found
    if result.status != "ok":
        pytest.skip(f"{name}: {result.status}: {result.reason}")
    assert result.value is not None
    return result.value


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["h2d", "hbm"])
def test_copies_are_within_a_tenth_of_what_was_published(name: str) -> None:
    known = {row["model"]: row[name] for row in csv.DictReader(io.StringIO(MEASURED))}
    for host, gpu in cards():
        model = gpu.identity()["model"]
        if not known.get(model):
            pytest.skip(f"nothing is known of {name} of {model}")
        assert measure(host, gpu, name) == pytest.approx(float(known[model]), rel=0.1)


@pytest.mark.gpu
def test_the_clock_is_the_one_that_the_card_can_hold() -> None:
    for host, gpu in cards():
        most = float(gpu.identity()["sm_clock_max_mhz"])
        assert 0.7 * most <= measure(host, gpu, "clock") <= 1.02 * most


@pytest.mark.gpu
def test_arithmetic_is_steady() -> None:
    for host, gpu in cards():
        first, second = measure(host, gpu, "fma"), measure(host, gpu, "fma")
        assert first == pytest.approx(second, rel=0.03)
