import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.config import ConfigError
from gpufleet_agent.drivers import cards
from gpufleet_agent.scenario import KINDS, Scenario, expand, load, matches, parse

FLEET = "[fleet]\nnodes = 2\n"
FAULT = f'{FLEET}[[fault]]\nnode = "gpu-001"\n'


@pytest.mark.parametrize("name", ["healthy", "three-faults", "everything"])
def test_the_scenarios_that_come_along_are_valid(scenarios: Path, name: str) -> None:
    assert load(scenarios / f"{name}.toml").node_names()


def test_everything_has_each_kind_once(everything: Scenario) -> None:
    assert sorted(fault.kind for fault in everything.fault) == sorted(KINDS)


def test_the_guide_names_every_kind_parameter_and_model_and_its_example_loads() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text()
    for name, kind in KINDS.items():
        row = next(line for line in guide.splitlines() if line.startswith(f"| `{name}`"))
        for param in kind.params:
            assert f"`{param}`" in row
    assert all(f"`{short}`" in guide for short in cards.SHORT)
    examples = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    assert [parse(text.encode()).fault[0].kind for text in examples] == ["card_lost", "agent_stopped"]


HANG = 'kind = "driver_hang"\ngpu = 0\n'
H2D = 'kind = "h2d_drop"\ngpu = 0\n'
LOST = 'kind = "card_lost"\n'
STOP = 'kind = "agent_stopped"\n'
BOOT = 'kind = "reboot"\n'
WRONG = {
    "[fleet]\nnodes = 0\n": "key fleet.nodes: 0: give a number from 1 to",
    "[fleet]\nnodes = 2\ngpus = 17\n": "key fleet.gpus: 17: give a number from 0 to 16",
    '[fleet]\nnodes = 2\nmodel = "GTX 970"\n': "key fleet.model: 'GTX 970' is not simulated: use one of H100",
    "[fleet]\nnodes = 2\ncards = 3\n": "unknown key fleet.cards",
    '[fleet]\nnodes = "a b"\n': "key fleet.nodes: 'a b' is no host name",
    '[fleet]\nnodes = "gpu-[4-1]"\n': "key fleet.nodes: [4-1] runs backwards",
    '[fleet]\nnodes = 2\nprefix = "-"\n': "key fleet.prefix",
    FAULT + 'kind = "card_list"\n': "key fault[0].kind: 'card_list' is unknown: use one of card_lost",
    FAULT + LOST: "key fault[0].gpu: card_lost hits cards: say which",
    FAULT + LOST + "gpu = 8\n": "key fault[0].gpu: 8: gpu-001 has cards 0 to 7",
    FAULT + LOST + "gpu = -1\n": "key fault[0].gpu: -1: gpu-001 has cards 0 to 7",
    FAULT + LOST + "gpu = []\n": "key fault[0].gpu: an empty list",
    FAULT + LOST + 'gpu = "all"\n': "key fault[0].gpu: 'all'",
    FAULT + BOOT + "gpu = 1\n": "key fault[0].gpu: reboot hits the whole host: remove it",
    FAULT + BOOT + "until = 9\n": "key fault[0].until: a reboot has no end of its own",
    FAULT + BOOT + 'expect = { rule = "A b", within_s = 3 }\n': "key fault[0].expect.rule: 'A b'",
    FAULT + BOOT + 'expect = { rule = "r", within_s = 0 }\n': "key fault[0].expect.within_s: 0: give seconds",
    FAULT + STOP + "at = -1\n": "key fault[0].at: -1: give seconds from the start",
    FAULT + STOP + "at = nan\n": "key fault[0].at: nan",
    FAULT + STOP + "at = 9\nuntil = 9\n": "key fault[0].until: 9: it must be after at = 9",
    FAULT + STOP + "params = { x = 1 }\n": "key fault[0].params.x: agent_stopped does not know it: remove it",
    FAULT
    + 'kind = "pcie_width"\ngpu = 0\nparams = { width = 7 }\n': "params.width: 7: use one of 1, 2, 4, 8, 16",
    FAULT + H2D + "params = { loss = 2 }\n": "key fault[0].params.loss: 2: give a number from 0 to 0.99",
    FAULT + H2D + "params = { loss = nan }\n": "key fault[0].params.loss: nan: give a number",
    FAULT + H2D + "params = { loss = true }\n": "key fault[0].params.loss: True: give a number",
    FAULT + HANG + 'params = { call = "" }\n': "key fault[0].params.call: ''",
    f'{FLEET}[[fault]]\nnode = "gpu-9"\n{BOOT}': "'gpu-9' is no host of this fleet (gpu-001 to gpu-002)",
    f"{FLEET}[[load]]\nutil = 101\n": "key load[0].util: 101: give a percentage",
    f'{FLEET}[[load]]\nkind = "idle"\nutil = 5\n': "key load[0].util: an idle card has none",
    f'{FLEET}[[load]]\nkind = "mine"\n': "key load[0].kind: Invalid enum value 'mine'",
    f'{FLEET}[[node]]\nnode = "*"\ngpus = 99\n': "key node[0].gpus: 99",
    f'{FLEET}[[node]]\nnode = "*"\nlabels = {{ Rack = "r1" }}\n': "labels.Rack: is no name for a label",
    f'{FLEET}[[node]]\nnode = "*"\nlabels = {{ rack = "" }}\n': "key node[0].labels.rack: '' is no",
    f'{FLEET}[[node]]\nnode = "*"\nlabels = {{ rack = 3 }}\n': "key node[0].labels",
    "[fleet]\nnodes = 1\ngpus = 0\n[[load]]\ngpu = 0\n": "key load[0].gpu: 0: gpu-001 has no cards",
    '[fleet]\nnodes = 1\ngpus = 0\n[[fault]]\nnode = "*"\nkind = "driver_not_loaded"\n': "needs no driver",
    '[fleet]\nnodes = 1\nmodel = "T4"\n[[fault]]\nnode = "*"\ngpu = 0\nkind = "mig_on"\n': "a Tesla T4 has",
    FAULT + 'kind = "ecc_uncorrectable"\ngpu = 0\nparams = { where = "l2" }\n': "'l2': use one of dram, sram",
}


@pytest.mark.parametrize(("text", "says"), WRONG.items())
def test_what_is_wrong_is_one_line_with_file_key_and_remedy(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text.encode(), "mine.toml")
    message = str(caught.value)
    assert message.startswith("mine.toml: ")
    assert says in message
    assert "\n" not in message


def test_hostlists() -> None:
    assert expand("gpu-[001-003,10],cpu-1") == ("gpu-001", "gpu-002", "gpu-003", "gpu-10", "cpu-1")
    assert expand("r[1-2]n[1-2]") == ("r1n1", "r1n2", "r2n1", "r2n2")
    for bad in (
        "",
        "a,,b",
        "a[",
        "a]",
        "a[1-]",
        "a[x]",
        "a[]",
        "a[1-99999999]",
        "a[1-9999]b[1-9999]",
        "[[1]]",
    ):
        with pytest.raises(ValueError, match=r"."):
            expand(bad)


@given(st.text(alphabet="ab01-[],* ", max_size=24))
def test_any_hostlist_is_names_or_a_value_error(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert names
    assert all(names)
    assert all(matches(text, name) for name in names if "*" not in name)


@given(st.text(max_size=300))
def test_any_other_text_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^scenario: "):
        parse(text.encode(errors="surrogatepass"))


def test_names_counts_and_models_of_hosts(scenarios: Path) -> None:
    fleet = load(scenarios / "healthy.toml")
    assert fleet.node_names() == ("gpu-001", "gpu-002", "gpu-003", "gpu-004", "cpu-001")
    assert [fleet.gpu_count(node) for node in fleet.node_names()] == [8, 8, 8, 8, 0]
    big = parse(b"[fleet]\nnodes = 1200\n")
    assert big.node_names()[::1199] == ("gpu-0001", "gpu-1200")


def test_labels_of_all_blocks_that_name_a_host() -> None:
    fleet = parse(
        b"[fleet]\nnodes = 4\ngpus = 2\n"
        b'[[node]]\nnode = "*"\nlabels = { pool = "train", rack = "r1" }\n'
        b'[[node]]\nnode = "gpu-[003-004]"\ngpus = 1\nlabels = { rack = "r2" }\n'
    )
    assert fleet.labels("gpu-001") == {"pool": "train", "rack": "r1"}
    assert fleet.labels("gpu-003") == {"pool": "train", "rack": "r2"}
    assert (fleet.gpu_count("gpu-001"), fleet.gpu_count("gpu-003")) == (2, 1)
    said = fleet.host("gpu-003", lambda: 0.0, 0).node().attributes
    assert {key: value for key, value in said.items() if key.startswith("label.")} == {
        "label.pool": "train",
        "label.rack": "r2",
    }
    plain = parse(b"[fleet]\nnodes = 1\n").host("gpu-001", lambda: 0.0, 0).node().attributes
    assert not any(key.startswith("label.") for key in plain)


def test_every_card_that_should_exist_is_in_the_inventory(everything: Scenario) -> None:
    rows = list(csv.DictReader(io.StringIO(everything.inventory_csv())))
    assert len(rows) == sum(map(everything.gpu_count, everything.node_names()))
    assert len({row["uuid"] for row in rows}) == len(rows)
    assert sum(row["node"] == "gpu-002" for row in rows) == 4  # the absent one too
    for row in rows:
        assert re.fullmatch(
            r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", row["uuid"]
        )
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:00\.0", row["pci"])
        geforce = "GeForce" in row["model"]
        assert re.fullmatch("" if geforce else r"\d{13}", row["serial"])


def test_baselines_name_each_card_twice(everything: Scenario) -> None:
    rows = list(csv.DictReader(io.StringIO(everything.baseline_csv())))
    cards_ = {row["uuid"] for row in csv.DictReader(io.StringIO(everything.inventory_csv()))}
    assert {(row["entity"], row["key"].partition("/")[0]) for row in rows} == {
        (f"gpu:{uuid}", key) for uuid in cards_ for key in ("sm_clock_busy_mhz", "h2d")
    }
    assert all(float(row["value"]) > 0 and float(row["spread"]) > 0 and int(row["n"]) > 0 for row in rows)


def test_expected_faults_name_node_entity_and_rule(scenarios: Path) -> None:
    fleet = load(scenarios / "three-faults.toml")
    uuids = {
        (row["node"], row["pci"]): row["uuid"] for row in csv.DictReader(io.StringIO(fleet.inventory_csv()))
    }
    found = fleet.faults_expected()
    assert [(one.fault, one.node, one.kind, one.at, one.rule) for one in found] == [
        (0, "gpu-001", "clock_pinned", 20.0, "gpu_downclocked"),
        (1, "gpu-002", "card_lost", 30.0, "gpu_missing"),
        (2, "gpu-003", "h2d_drop", 20.0, "bandwidth_regression"),
    ]
    assert found[0].entity == "gpu:" + uuids["gpu-001", "0000:61:00.0"]
    several = parse(
        b'[fleet]\nnodes=2\ngpus=2\n[[fault]]\nnode="*"\ngpu="*"\nkind="hw_brake"\nexpect={rule="r",within_s=9}\n'
        b'[[fault]]\nnode="gpu-002"\nkind="reboot"\nexpect={rule="r",within_s=9}\n'
    ).faults_expected()
    assert [one.fault for one in several] == [0, 0, 0, 0, 1]
    assert (several[-1].node, several[-1].entity) == ("gpu-002", "node:")


def test_when_an_agent_runs_and_how_far_its_clock_is_off(everything: Scenario) -> None:
    runs = {
        node: [everything.running(node, t) for t in (0, 10, 69.9, 70)]
        for node in ("gpu-001", "gpu-012", "gpu-013")
    }
    assert runs == {
        "gpu-001": [True, True, True, True],
        "gpu-012": [True, False, False, True],
        "gpu-013": [True, False, False, True],
    }
    assert [everything.clock_offset_s("gpu-014", t) for t in (0, 10, 70)] == [0, -120, 0]
    assert everything.clock_offset_s("gpu-001", 10) == 0
