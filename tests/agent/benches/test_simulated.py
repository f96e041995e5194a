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
        here, there = (gpu.pci for gpu in host.gpus())
        pairs = ((here, there), (there, here))
        one, other = (host.run_bench(name, {"pci": pci, "peer": peer}) for pci, peer in pairs)
        assert (one.status, one.unit, other.status) == ("ok", unit, "ok")
        assert one.value
        assert other.value
        found[name] = one.value / other.value
    return found


def test_healthy_cards_are_alike(tmp_path: Path) -> None:
    assert set(values(tmp_path, "")) == {"h2d", "d2h", "hbm", "clock", "fma", "p2p", "gemm"}
    assert list(values(tmp_path, "").values()) == [pytest.approx(1.0, abs=0.05)] * 7


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


def test_copies_between_cards_lose_with_their_links(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(
        FLEET
        + '[[fault]]\nnode = "gpu-a01"\ngpu = 1\nat = 60\nkind = "nvlink_down"\nparams = { count = 9 }\n'
    )
    found = []
    for at in (0.0, 61.0):
        host = scenario.load(path).host("gpu-a01", lambda at=at: at, 0)  # type: ignore[misc]
        here, there = (gpu.pci for gpu in host.gpus())
        result = host.run_bench("p2p", {"pci": here, "peer": there})
        assert (result.status, result.link) == ("ok", "nvlink")
        assert result.value is not None
        found.append(result.value)
    assert found[0] == pytest.approx(396, rel=0.02)
    assert found[1] == pytest.approx(found[0] / 2, rel=0.02)


def test_a_card_that_calculates_wrong_has_no_value_and_nothing_else_to_show(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(FLEET + '[[fault]]\nnode = "gpu-a01"\ngpu = 0\nat = 0\nkind = "silent_corruption"\n')
    host = scenario.load(path).host("gpu-a01", lambda: 60.0, 0)
    wrong, right = (gpu.pci for gpu in host.gpus())
    for name in ("fma", "gemm"):
        result = host.run_bench(name, {"pci": wrong})
        assert (result.status, result.value) == ("failed", None)
        assert result.reason.startswith("corrupt: the same work gave other bits")
        assert host.run_bench(name, {"pci": right}).status == "ok"
    assert host.run_bench("h2d", {"pci": wrong}).status == "ok"


def test_a_card_that_sometimes_calculates_wrong(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(
        FLEET + '[[fault]]\nnode = "gpu-a01"\ngpu = 0\nat = 0\n'
        'kind = "silent_corruption"\nparams = { share = 0.5 }\n'
    )
    now = [0.0]
    host = scenario.load(path).host("gpu-a01", lambda: now[0], 0)
    pci = host.gpus()[0].pci
    found = []
    for second in range(100):
        now[0] = float(second)
        found.append(host.run_bench("gemm", {"pci": pci}).status)
    assert 25 < found.count("failed") < 75
