"""The rules of CONTRIBUTING as tests: what was added is listed, named, documented and drilled."""

import ast
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

import gpufleet_agent.benches
import gpufleet_agent.probes
from gpufleet.metric import Kind, Metric, Type, Unit
from gpufleet_agent.probes import agent

ROOT = Path(__file__).resolve().parents[1]
RULES = sorted((ROOT / "collector/gpufleet_collector/sql/rules").glob("[a-z]*.sql"))
VIEWS = sorted((ROOT / "collector/gpufleet_collector/sql/views").glob("*.sql"))

SUFFIX = {
    Unit.MHZ: "_mhz",
    Unit.WATT: "_w",
    Unit.JOULE: "_j",
    Unit.CELSIUS: "_c",
    Unit.BYTE: "_bytes",
    Unit.PERCENT: "_pct",
    Unit.SECOND: "_s",
    Unit.GBIT_PER_S: "_gbps",
    Unit.RPM: "_rpm",
}


def tables() -> dict[str, tuple[Metric, ...]]:
    found = {name: probe.METRICS for name, probe in gpufleet_agent.probes.PROBES.items()}
    return found | {
        "agent": agent.METRICS,
        "bench": gpufleet_agent.benches.METRICS,
    }


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_probe_is_listed() -> None:
    modules = {module.name for module in pkgutil.iter_modules(gpufleet_agent.probes.__path__)}
    assert modules == set(gpufleet_agent.probes.PROBES) | {"agent"}


def test_every_bench_is_listed() -> None:
    modules = {module.name for module in pkgutil.iter_modules(gpufleet_agent.benches.__path__)}
    assert modules == set(gpufleet_agent.benches.BENCHES)


@pytest.mark.parametrize("table", tables())
def test_metrics_are_named_by_their_unit(table: str) -> None:
    metrics = tables()[table]
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    assert not {"ts", "received_at", "node", "boot_id"} & set(names)
    for metric in metrics:
        assert re.fullmatch(r"[a-z][a-z0-9_]{0,62}", metric.name), metric.name
        assert metric.help.endswith("."), metric.name
        assert (metric.kind is Kind.COUNTER) == (
            metric.name.endswith("_total") or metric.name == "uptime_s"
        ), metric.name
        bare = re.sub(r"(_min|_p10|_total)$", "", metric.name)
        if metric.unit in SUFFIX and metric.name not in ("seconds", "gpu_seconds"):
            assert bare.endswith(SUFFIX[metric.unit]), metric.name
        if metric.type is Type.F64:
            assert metric.low is not None, metric.name
            assert metric.high is not None, metric.name
        if metric.type in (Type.STRING, Type.BOOL):
            assert metric.low is None, metric.name
            assert metric.high is None, metric.name


def test_keys_come_first() -> None:
    for table, metrics in tables().items():
        kinds = [metric.kind is Kind.KEY for metric in metrics]
        assert kinds == sorted(kinds, reverse=True), table


@pytest.mark.parametrize("rule", RULES, ids=lambda path: path.stem)
def test_every_rule_has_a_runbook(rule: Path) -> None:
    runbook = ROOT / "docs/runbooks" / f"{rule.stem}.md"
    assert runbook.is_file(), f"write {runbook.relative_to(ROOT)}"
    text = runbook.read_text()
    assert re.match(r"# .+\n\n\w[^#]{80,}", text), f"{runbook.name}: does not say what it means"
    for part in ("## First three commands", "## Likely causes", "## When it clears"):
        assert part in text, f"{runbook.name}: {part!r} is missing"


def drills() -> dict[str, set[str]]:
    """Rule -> what the marks `drill(rule, what, ...)` say; the judge's conftest holds each test to them."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests/collector/judge").glob("test_*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.drill":
                rule, *kinds = [ast.literal_eval(arg) for arg in call.args]
                found.setdefault(rule, set()).update(kinds)
    return found


def test_every_rule_has_its_three_drills() -> None:
    found = drills()
    assert found.keys() == {path.stem for path in RULES}
    assert {
        rule: kinds for rule, kinds in found.items() if kinds != {"fires", "near_miss", "not_judged"}
    } == {}


def test_every_runbook_has_a_rule() -> None:
    assert {path.stem for path in (ROOT / "docs/runbooks").glob("*.md")} == {path.stem for path in RULES}


@pytest.mark.parametrize("view", VIEWS, ids=lambda path: path.stem)
def test_every_view_says_what_it_is_for(view: Path) -> None:
    assert re.match(r"-- \w.{10,}", view.read_text())
    assert view.stem in (ROOT / "docs/sql.md").read_text()


def test_generated_protobuf_code_is_fresh() -> None:
    generate = load(ROOT / "protos/generate.py")
    assert generate.STAMP.read_text().strip() == generate.sources_sha256(), "run `make protos`"


def test_schema_page_is_fresh() -> None:
    assert load(ROOT / "docs/generate.py").schema() == (ROOT / "docs/schema.md").read_text(), (
        "run `make docs`"
    )


def test_locks_name_no_host() -> None:
    for lock in ROOT.glob("requirements*.lock"):
        assert "://" not in lock.read_text(), lock.name
        assert "--hash=sha256:" in lock.read_text(), lock.name


def test_packages_are_typed() -> None:
    for package in (
        "agent/gpufleet_agent",
        "collector/gpufleet_collector",
        "cli/gpufleet_cli",
        "protos/gpufleet",
    ):
        assert (ROOT / package / "py.typed").is_file(), package


@pytest.mark.parametrize(
    ("program", "group"),
    [("gpufleet_agent.main", "main"), ("gpufleet_collector.main", "main"), ("gpufleet_cli.main", "fleet")],
)
def test_every_command_and_option_has_help(program: str, group: str) -> None:
    pending = [(program, getattr(importlib.import_module(program), group))]
    while pending:
        path, command = pending.pop()
        assert command.help, path
        for param in command.params:
            assert not isinstance(param, click.Option) or param.help, f"{path} {param.name}"
        names = command.list_commands(click.Context(command)) if isinstance(command, click.Group) else []
        for name in names:
            child = command.get_command(click.Context(command), name)
            pending.append((f"{path} {name}", child))
