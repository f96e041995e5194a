"""What benches measure on a real card, beside what its model is known for."""

import csv
import io
import itertools
from pathlib import Path

import pytest

from gpufleet_agent.benches import BENCHES
from gpufleet_agent.drivers import BenchResult, Gpu
from gpufleet_agent.drivers.nvml import NvmlHost
from gpufleet_agent.measure import Place

MEASURED = """model,h2d,hbm,nvlink
NVIDIA H200,55.4,,396
NVIDIA H100 80GB HBM3,54.8,2570,380
NVIDIA A100-SXM4-80GB,25.9,,276
NVIDIA A100-SXM4-40GB,25.9,,276
"""
"""GB/s of good cards, read and written both counted in memory, by published measurements."""


def cards() -> list[tuple[NvmlHost, Gpu]]:
    host = NvmlHost(Path("/"))
    return [(host, gpu) for gpu in host.gpus()]


def run(host: NvmlHost, gpu: Gpu, name: str, peer: Gpu | None = None) -> tuple[BenchResult, str]:
    found = BENCHES[name].run(Place(host, gpu, "/tmp", peer=peer), BENCHES[name].PARAMS)
    assert isinstance(found, tuple)
    return found


def measure(host: NvmlHost, gpu: Gpu, name: str, peer: Gpu | None = None) -> float:
    result, _ = run(host, gpu, name, peer)
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
@pytest.mark.parametrize("name", ["fma", "gemm"])
def test_arithmetic_is_steady(name: str) -> None:
    for host, gpu in cards():
        first, second = measure(host, gpu, name), measure(host, gpu, name)
        assert first == pytest.approx(second, rel=0.03)


@pytest.mark.gpu
def test_tensor_cores_do_more_than_the_rest_of_the_card() -> None:
    for host, gpu in cards():
        result, convention = run(host, gpu, "gemm")
        if not convention.startswith("mma"):
            pytest.skip(f"{convention}: the card has no tensor cores")
        assert result.value is not None, result.reason
        assert result.value > 1.5 * measure(host, gpu, "fma")


@pytest.mark.gpu
def test_copies_between_cards_are_those_of_their_link_and_steady() -> None:
    known = {row["model"]: row["nvlink"] for row in csv.DictReader(io.StringIO(MEASURED))}
    found = cards()
    if len(found) < 2:
        pytest.skip(f"p2p needs two cards: this host has {len(found)}")
    measured = 0
    for (host, gpu), (_, peer) in itertools.permutations(found, 2):
        result, _ = run(host, gpu, "p2p", peer)
        if result.status == "unsupported":
            continue
        assert result.status == "ok", result.reason
        second = measure(host, gpu, "p2p", peer)
        assert result.value == pytest.approx(second, rel=0.03)
        typical = known.get(gpu.identity()["model"]) if result.link == "nvlink" else None
        if typical:
            assert second == pytest.approx(float(typical), rel=0.1)
        measured += 1
    if not measured:
        pytest.skip("no two cards of this host reach each other's memory")
