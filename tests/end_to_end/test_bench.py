"""Benches that a person asks for: a real collector, a real agent with simulated cards, the CLI."""

import json
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Fleet

NODE = "gpu-003"
SCENARIO = """
[fleet]
nodes = 3
gpus = 4
model = "H100"
seed = 7

[[fault]]
at = 0
node = "gpu-003"
gpu = 2
kind = "pcie_width"
params = { width = 8 }
"""


def start(fleet: "Fleet") -> None:
    """A collector that knows what is normal, and the agent of a host with one link at half its width."""
    scenario = fleet.folder / "scenario.toml"
    scenario.write_text(SCENARIO)
    config = fleet.folder / f"{NODE}.toml"
    lines = config.read_text().splitlines()
    lines = [f'scenario = "{scenario}"' if line.startswith("scenario") else line for line in lines]
    config.write_text("\n".join(lines) + "\n")
    cards, normal = fleet.folder / "cards.csv", fleet.folder / "normal.csv"
    fleet.command(
        "gpufleet_agent.main", "simulate", str(scenario), "--inventory-csv", str(cards),
        "--baseline-csv", str(normal),
    )  # fmt: skip
    fleet.start_collector()
    fleet.wait("the collector answers", lambda: fleet.fleet("version", check=False).returncode == 0)
    fleet.fleet("inventory", "import", str(cards), "--baselines", str(normal))
    fleet.start_agent(NODE)
    fleet.wait("the agent is heard", lambda: bool(fleet.sql(f"select 1 from gpu where node = '{NODE}'")))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_through_the_stream_and_back(fleet: "Fleet") -> None:
    start(fleet)
    good = fleet.fleet("bench", "run", NODE, "h2d", "--gpu", "1", "-o", "json")
    assert good.returncode == 0
    [item] = json.loads(good.stdout)["items"]
    assert (item["gpu_index"], item["status"], item["verdict"], item["code"]) == (
        1,
        "ok",
        "good",
        "as_before",
    )
    assert "h2d: queued" in good.stderr
    assert "h2d: runs" in good.stderr

    bad = fleet.fleet("bench", "run", NODE, "h2d", "-o", "json", check=False)
    assert bad.returncode == 1, bad.stderr
    verdicts = {item["gpu_index"]: item for item in json.loads(bad.stdout)["items"]}
    assert [verdicts[index]["verdict"] for index in range(4)] == ["good", "good", "bad", "good"]
    assert verdicts[2]["code"] == "slower", "half a link is slower in the series of the whole one"
    assert 0.3 < float(verdicts[2]["ratio"]) < 0.7

    unknown = fleet.fleet("bench", "run", NODE, "no_such", check=False)
    assert unknown.returncode == 6
    assert "no bench no_such: there is" in unknown.stderr
    away = fleet.fleet("bench", "run", "gpu-001", check=False)
    assert (away.returncode, "no agent of gpu-001 is connected" in away.stderr) == (6, True)

    rows = fleet.items("bench", "history", f"{NODE}/2")
    assert {str(row["link"]) for row in rows} == {"pcie5x16"}
    [worst, *_] = fleet.items("bench", "compare", NODE)
    assert worst["place"] == f"{NODE}/2"
    assert [row["verb"] for row in fleet.sql("select verb from audit where verb like 'bench%'")] == [
        "bench run"
    ] * 3

    def asked() -> str:
        """What came of one more run; empty while no agent is there."""
        done = fleet.fleet("bench", "run", NODE, "fma", "--gpu", "0", "-o", "json", check=False)
        return done.stdout if done.returncode in (0, 12) else ""

    fleet.wait("the hour's card time is used up", lambda: "budget:" in asked(), 120)
    fleet.kill(NODE, signal.SIGKILL)
    fleet.start_agent(NODE)
    answers: list[str] = []

    def answered() -> bool:
        answers.append(asked())
        return bool(answers[-1])

    fleet.wait("the new agent answers", answered)
    assert "budget:" in answers[-1], "killed and started again, it has no more than was left"
