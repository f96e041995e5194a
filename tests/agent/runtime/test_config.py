import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.config import ConfigError, parse
from gpufleet_agent.config import AgentConfig, backoff
from gpufleet_agent.probes import PROBES

PACKAGED = Path(__file__).parents[3] / "packaging" / "agent.toml"


def keys(table: dict[str, object], above: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in table.items():
        found |= keys(value, f"{above}{name}.") if isinstance(value, dict) else {above + name}
    return found


def test_the_packaged_file_holds_every_key_with_its_default() -> None:
    text = re.sub(r"^# ", "", PACKAGED.read_text(), flags=re.MULTILINE)
    assert parse(text.encode(), AgentConfig, "agent.toml") == AgentConfig()
    assert keys(tomllib.loads(text)) == keys(msgspec.to_builtins(AgentConfig()))


def test_as_it_is_shipped_it_changes_nothing() -> None:
    assert parse(PACKAGED.read_bytes(), AgentConfig, "agent.toml") == AgentConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colector = 'x:1'", "unknown key colector: remove it or correct its name"),
        ("[probes.gpuu]\n", "unknown key probes.gpuu"),
        ("[probes.gpu]\nevry_s = 1", "unknown key probes.gpu.evry_s"),
        ("[probes.gpu]\nevery_s = 0", "key probes.gpu.every_s"),
        ("[probes.gpu]\nevery_s = -5", "key probes.gpu.every_s"),
        ("[probes.gpu]\nevery_s = nan", "key probes.gpu.every_s"),
        ("[probes.gpu]\nevery_s = inf", "key probes.gpu.every_s"),
        ("[probes.gpu]\nevery_s = '5s'", "key probes.gpu.every_s"),
        ("[benches.memcpy]\nenabled = 1", "key benches.memcpy.enabled"),
        ("[spool]\nmax_mb = 0", "key spool.max_mb"),
        ("[push]\nseal_s = 0", "key push.seal_s"),
        ("[sampler]\ndeadline_s = 0", "key sampler.deadline_s"),
        ("[sampler]\nretry_s = 60\nretry_max_s = 5", "key sampler.retry_max_s"),
        ("collector = 'nowhere'", "key collector: 'nowhere' is not HOST:PORT"),
        ("collector = 'host:70000'", "key collector"),
        ("driver = 'cuda'", "key driver"),
        ("driver = 'simulated'", "key simulated.scenario: not set"),
        ("node = 'a b'", "key node"),
        ("state_dir = 'here'", "key state_dir: 'here' is not an absolute path"),
        ("[tls]\nca = 3", "key tls.ca"),
        ("[labels]\nRack = 'r12'", "key labels.Rack: is no name for a label"),
        ("[labels]\nserver = 'nfs1'", "key labels.server: is no name for a label"),
        ("[labels]\nrack = ''", "key labels.rack: '' is no label"),
        ('[labels]\nrack = "a\\nb"', "key labels.rack"),
        ("[labels]\nrack = 12", "key labels"),
        ("[labels]\n" + "".join(f"a{n} = 'x'\n" for n in range(17)), "key labels: 17 labels"),
        ("[loader]\nworker_names = 'x'", "key loader.worker_names"),
        ("[loader]\nworker_names = [7]", "key loader.worker_names"),
        ("[loader]\nworker_names = ['ok', '']", "key loader.worker_names: '' is no name of a worker"),
        ("[loader]\nworker_names = [' ']", "key loader.worker_names: ' ' is no name of a worker"),
        ('[loader]\nworker_names = ["a\\nb"]', "key loader.worker_names"),
        (f"[loader]\nworker_names = ['{'x' * 65}']", "key loader.worker_names"),
        (f"[loader]\nworker_names = {['x'] * 33}", "key loader.worker_names: 33 names, 32 are allowed"),
        ("= 3", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parse(text.encode(), AgentConfig, "agent.toml")
    assert str(wrong.value).startswith("agent.toml: ")
    assert said in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_labels_are_free_names() -> None:
    config = parse(b"[labels]\nrack = 'r12'\npower_feed = 'A / north'", AgentConfig, "agent.toml")
    assert config.labels == {"rack": "r12", "power_feed": "A / north"}


@given(st.binary(max_size=200))
def test_no_file_gives_anything_but_a_configuration_or_a_config_error(text: bytes) -> None:
    try:
        parsed = parse(text, AgentConfig, "agent.toml")
    except ConfigError:
        return
    assert isinstance(parsed, AgentConfig)


def test_one_key_of_a_probe_leaves_the_others_alone() -> None:
    config = parse(b"[probes.pci]\nenabled = false", AgentConfig, "agent.toml")
    assert not config.probe("pci").enabled
    assert config.probe("pci").every_s == PROBES["pci"].EVERY
    assert config.probe("gpu") == AgentConfig().probe("gpu")


@given(st.integers(0, 10_000), st.floats(0.01, 100), st.floats(100, 10_000))
def test_a_back_off_grows_and_stays_within_its_bounds(attempt: int, first: float, most: float) -> None:
    assert first <= backoff(attempt, first, most) <= most
    assert backoff(attempt, first, most) <= backoff(attempt + 1, first, most)
