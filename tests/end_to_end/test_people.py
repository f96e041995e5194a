"""A lost card, and what people do with its incident: real processes, a killed collector, new evidence."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Fleet

SCENARIO = Path(__file__).parents[1] / "fixtures/scenarios/end-to-end.toml"


def lost(fleet: "Fleet", *words: str) -> dict[str, object]:
    """The incident of the card that gpu-001 loses."""
    found = [item for item in fleet.items("incidents", *words) if item["cause_rule"] == "gpu_missing"]
    return found[0] if found else {}


@pytest.mark.slow
def test_people_and_a_lost_card(fleet: "Fleet") -> None:
    cards = str(fleet.folder / "cards.csv")
    fleet.command("gpufleet_agent.main", "simulate", str(SCENARIO), "--inventory-csv", cards)
    fleet.start_collector()
    fleet.wait("the collector answers", lambda: fleet.fleet("version", check=False).returncode == 0)
    fleet.fleet("inventory", "import", cards)
    fleet.start_agent("gpu-001")
    fleet.wait("the lost card is flagged", lambda: bool(lost(fleet)))
    number = str(lost(fleet)["id"])

    fleet.fleet("incidents", "ack", number, "--note", "reseating it")
    fleet.fleet("incidents", "silence", "node=gpu-001", "--for", "1h", "--reason", "known")
    fleet.fleet("maintenance", "start", "gpu-[001-002]", "--for", "1h", "--reason", "riser")
    assert lost(fleet)["flags"] == ["acknowledged", "silenced"]
    status = fleet.document("status")
    assert status["known"] == {"acknowledged": 1, "silenced": 1, "maintenance": 0}
    gpus = status["gpus"]
    assert isinstance(gpus, dict)
    assert gpus["critical"] == 1
    assert fleet.fleet("--exit-code", "status", check=False).returncode == 11

    fleet.kill("collector", signal.SIGKILL)
    fleet.start_collector()
    fleet.wait("it is back", lambda: lost(fleet).get("flags") == ["acknowledged", "silenced"])
    [window] = fleet.items("maintenance")
    assert window["nodes"] == ["gpu-001", "gpu-002"]

    done = fleet.fleet("incidents", "close", number, "--reason", "looks fine to me")
    assert "still violates" in done.stdout
    assert f"closed by {window['by']}: looks fine to me" in str(
        [item["cause"] for item in fleet.items("incidents", "list", "--all")]
    )
    again = "select incident from finding where rule = 'gpu_missing' and state = 'firing'"
    fleet.wait("new evidence opens it again", lambda: bool(fleet.sql(again)))
    [row] = fleet.sql(again)
    [item] = fleet.items("incidents", "show", str(row["incident"]))
    assert (item["state"], item["acknowledged"]) == ("open", None)

    verbs = [
        row["verb"] for row in fleet.sql("select verb from audit where verb <> 'hello' order by logged_at")
    ]
    assert verbs == [
        "inventory import", "incidents ack", "incidents silence", "maintenance start", "incidents close",
    ]  # fmt: skip
    report = fleet.fleet("incidents", "report", "--since", "1h", "-o", "md").stdout
    assert report.startswith("# Fleet hand-over\n")
    assert "reseating it" in report
