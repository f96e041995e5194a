from pathlib import Path

import pytest

from gpufleet_agent import scenario
from gpufleet_agent.drivers.simulated_benches import UNITS

FLEET = '[fleet]\nnodes = "gpu-a01"\ngpus = 2\nmodel = "H100"\n'


def values(tmp_path: Path, fault: str) -> dict[str, float]:
    """How card 0 does beside card 1, per bench."""
    path = tmp_path / "scenario.toml"
    path.write_text(FLEET + fault)
    host = scenario.load(path).host("gpu-a01", lambda: 60.0, 0)
    found = {}
    for name, unit in UNITS.items():
        one, other = (host.run_bench(name, {"pci": gpu.pci}) for gpu in host.gpus())
        assert (one.status, one.unit, other.status) == ("ok", unit, "ok")
        assert one.value
        assert other.value
        found[name] = one.value / other.value
    return found


def test_healthy_cards_are_alike(tmp_path: Path) -> None:
    assert set(values(tmp_path, "")) == {"h2d", "d2h", "hbm", "clock", "fma"}
    assert list(values(tmp_path, "").values()) == [pytest.approx(1.0, abs=0.05)] * 5


@pytest.mark.parametrize(
    ("fault", "slower"),
    [
        ('kind = "h2d_drop"\nparams = { loss = 0.3 }', {"h2d"}),
        ('kind = "pcie_width"\nparams = { width = 8 }', {"h2d", "d2h"}),
    ],
)
def test_a_fault_shows_in_the_benches_that_it_concerns(tmp_path: Path, fault: str, slower: set[str]) -> None:
    found = values(tmp_path, f'[[fault]]\nnode = "gpu-a01"\ngpu = 0\nat = 0\n{fault}\n')
    assert {name for name, ratio in found.items() if ratio < 0.9} == slower


def test_a_bench_that_is_not_simulated_says_so(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(FLEET)
    host = scenario.load(path).host("gpu-a01", lambda: 60.0, 0)
    assert host.run_bench("nonsense", {}).status == "unsupported"
