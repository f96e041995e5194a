"""What tools of a host print, and what becomes of it: outputs as their formats are documented."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet_agent import tool
from gpufleet_agent.benches import (
    METRICS,
    TOOLS,
    all_reduce_perf,
    dcgmi_diag,
    fio,
    ib_write_bw,
    nvbandwidth,
)
from gpufleet_agent.measure import Part, Place

OUTPUTS = Path(__file__).parents[2] / "fixtures" / "bench_tools"
A, B, C = (f"gpu:GPU-00000000-0000-4000-8000-0000000000{x}" for x in ("aa", "bb", "cc"))
CARDS = {"0000:18:00.0": A, "0000:2a:00.0": B, "0000:3a:00.0": C}
NUMBERS = {"0": A, "1": B}

PARSERS: dict[str, Callable[[str], list[Part]]] = {
    "nvbandwidth": lambda text: nvbandwidth.parse(text, CARDS),
    "all_reduce_perf": all_reduce_perf.parse,
    "ib_write_bw": lambda text: ib_write_bw.parse(text, "6.14"),
    "dcgmi_diag": lambda text: dcgmi_diag.parse(text, NUMBERS),
    "fio": fio.parse,
}
MOST = {"nvbandwidth": 2e4, "all_reduce_perf": 2e4, "ib_write_bw": 400.0, "dcgmi_diag": 1.0, "fio": 1000.0}
FILES = sorted(path for path in OUTPUTS.glob("*.out") if path.name != "dcgmi-discovery.out")

BUSBW = "busbw_8_cards_8589934592_bytes"
D2D = "copied_once:device_to_device_memcpy_write_ce:slowest_of_2"
H2D, D2H, LOCAL = (
    f"copied_once:{name}"
    for name in ("host_to_device_memcpy_ce", "device_to_host_memcpy_ce", "device_local_copy")
)

FOUND: dict[str, set[tuple[str, str, float | None, str, str]]] = {
    "nvbandwidth-0.8-good": {
        (A, "ok", 55.38, H2D, "0.8"), (B, "ok", 55.40, H2D, "0.8"), (C, "ok", 55.37, H2D, "0.8"),
        (A, "ok", 55.06, D2H, "0.8"), (B, "ok", 55.07, D2H, "0.8"), (C, "ok", 55.06, D2H, "0.8"),
        (A, "ok", 379.90, D2D, "0.8"), (B, "ok", 380.01, D2D, "0.8"), (C, "ok", 371.20, D2D, "0.8"),
        (A, "ok", 1290.11, LOCAL, "0.8"), (B, "ok", 1289.70, LOCAL, "0.8"), (C, "ok", 1291.02, LOCAL, "0.8"),
    },
    "nvbandwidth-0.8-degraded": {
        (A, "ok", 55.38, H2D, "0.8"), (B, "ok", 13.21, H2D, "0.8"),
        (A, "ok", 55.06, D2H, "0.8"), (B, "failed", None, D2H, "0.8"),
        ("node:", "unsupported", None, "copied_once:device_to_device_memcpy_write_ce", "0.8"),
        (A, "failed", None, LOCAL, "0.8"), (B, "ok", 1291.02, LOCAL, "0.8"),
    },
    "nvbandwidth-0.8-error": {
        ("node:", "failed", None, H2D, "0.8"),
        ("node:", "unsupported", None, "copied_once:not_a_test", "0.8"),
    },
    "nvbandwidth-0.6-waived": {
        (A, "ok", 55.3812, H2D, "0.6"),
        ("node:", "unsupported", None, "copied_once:device_to_device_memcpy_write_ce", "0.6"),
        ("node:", "failed", None, LOCAL, "0.6"), ("node:", "failed", None, D2H, "0.6"),
    },
    "nvbandwidth-0.8-no-driver": {("node:", "failed", None, "copied_once", "0.8")},
    "all_reduce_perf-2.17-good": {("node:", "ok", 479.64, BUSBW, "nccl2.27.4")},
    "all_reduce_perf-2.17-mpirun": {("node:", "ok", 479.64, BUSBW, "nccl2.27.4")},
    "all_reduce_perf-2.13-ring": {("node:", "ok", 365.48, BUSBW, "nccl2.18.3")},
    "all_reduce_perf-2.0-good": {("node:", "ok", 120.0, "busbw_2_cards_1073741824_bytes", "")},
    "all_reduce_perf-2.13-wrong": {("node:", "failed", None, BUSBW, "")},
    "ib_write_bw-6-good": {("port:mlx5_0/1", "ok", 394.77 / 8, "copied_once_8388608_bytes", "6.14")},
    "ib_write_bw-6-degraded": {("port:mlx5_0/1", "ok", 97.11 / 8, "copied_once_8388608_bytes", "6.14")},
    "ib_write_bw-5-mb": {("port:mlx5_0/1", "ok", 12.25806, "copied_once_8388608_bytes", "6.14")},
    "dcgmi_diag-4-good": {
        (A, "ok", 1.0, "passed:software", "4.2.3"), (B, "ok", 1.0, "passed:software", "4.2.3"),
        (A, "ok", 1.0, "passed:pcie", "4.2.3"), (B, "ok", 1.0, "passed:pcie", "4.2.3"),
        (A, "unsupported", None, "passed:memory", "4.2.3"),
        (B, "unsupported", None, "passed:memory", "4.2.3"),
    },
    "dcgmi_diag-4-failed": {
        (A, "failed", None, "passed:pcie", "4.2.3"), (B, "failed", None, "passed:pcie", "4.2.3"),
        (A, "ok", 1.0, "passed:memory", "4.2.3"), (B, "failed", None, "passed:memory", "4.2.3"),
        ("node:", "failed", None, "passed:memory", "4.2.3"),
    },
    "dcgmi_diag-3-good": {
        (A, "ok", 1.0, "passed:denylist", "3.1.8"), (B, "ok", 1.0, "passed:denylist", "3.1.8"),
        (A, "ok", 1.0, "passed:pcie", "3.1.8"), (B, "failed", None, "passed:pcie", "3.1.8"),
        (A, "ok", 1.0, "passed:gpu_memory", "3.1.8"), (B, "unsupported", None, "passed:gpu_memory", "3.1.8"),
    },
    "fio-3-good": {("node:", "ok", 6.871947673, "read", "fio-3.36")},
    "fio-2-good": {("node:", "ok", 0.2097152, "read", "fio-2.21")},
    "fio-3-mixed": {("node:", "ok", 2.0, "read", "fio-3.36"), ("node:", "ok", 0.5, "write", "fio-3.36")},
    "fio-3-error": {("node:", "failed", None, "read", "fio-3.36")},
}  # fmt: skip

UNREADABLE = {
    "nvbandwidth-0.5-good": "does not fit",  # two cards, and this host has three: see below
    "nvbandwidth-0.8-truncated": "no whole JSON document",
    "nvbandwidth-twice": "2 results",
    "all_reduce_perf-2.13-nan": "no time and bandwidth",
    "all_reduce_perf-2.13-comma": "garbled",
    "all_reduce_perf-2.13-error": "not whole",
    "all_reduce_perf-2.17-truncated": "not whole",
    "ib_write_bw-6-zero": "no bandwidth",
    "ib_write_bw-6-truncated": "not whole",
    "ib_write_bw-6-error": "0 results",
    "dcgmi_diag-4-error": "NVVS binary was not found",
    "dcgmi_diag-4-truncated": "no whole JSON document",
    "fio-3-nothing": "nothing was read",
    "fio-3-disagree": "no bandwidth",
    "fio-3-truncated": "no whole JSON document",
}


def parse(name: str, text: str | None = None) -> list[Part]:
    return PARSERS[name.split("-")[0]]((OUTPUTS / f"{name}.out").read_text() if text is None else text)


@pytest.mark.parametrize("name", FOUND)
def test_an_output_gives_its_results(name: str) -> None:
    parts = parse(name)
    found = {(p.entity, p.result.status, p.convention, p.version): p.result.value for p in parts}
    assert len(found) == len(parts)
    expected = {(e, s, c, v): value for e, s, value, c, v in FOUND[name]}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == (None if value is None else pytest.approx(value, rel=1e-5)), key
    assert all(part.result.reason or part.result.status == "ok" for part in parts)


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_output_that_is_no_result_gives_none(name: str) -> None:
    said = []
    try:
        said = [(part.result.status, part.result.value, part.result.reason) for part in parse(name)]
    except tool.BadTool as error:
        said = [("failed", None, str(error))]
    assert said
    for status, value, reason in said:
        assert (status, value) == ("failed", None)
        assert UNREADABLE[name] in reason


def test_every_output_is_looked_at() -> None:
    assert {path.stem for path in FILES} == FOUND.keys() | UNREADABLE.keys()


@pytest.mark.parametrize(
    ("command", "chosen"),
    [
        (all_reduce_perf.COMMAND, ""),
        (("env", "NCCL_ALGO=Ring", "all_reduce_perf"), "_algo_ring"),
        (("mpirun", "-x", "NCCL_NVLS_ENABLE=0", "-x", "NCCL_PROTO=Simple", "all_reduce_perf"),
         "_nvls_enable_0_proto_simple"),
        (("srun", "--export=ALL,NCCL_ALGO=^NVLS,NCCL_IB_HCA=mlx5", "all_reduce_perf"), "_algo_not_nvls"),
        (("env", "MY_NCCL_ALGO=x", "NCCL_ALGORITHM=y", "all_reduce_perf"), ""),
    ],
)  # fmt: skip
def test_the_ring_of_a_sites_command_is_another_series_than_what_nccl_chooses(
    command: tuple[str, ...], chosen: str
) -> None:
    assert all_reduce_perf.choice(command) == chosen
    text = (OUTPUTS / "all_reduce_perf-2.17-good.out").read_text()
    (part,) = all_reduce_perf.parse(text, chosen)
    assert part.convention == f"busbw_8_cards_8589934592_bytes{chosen}"


def test_an_old_nvbandwidth_counts_cards_in_the_order_of_the_bus() -> None:
    two = {pci: CARDS[pci] for pci in ("0000:2a:00.0", "0000:18:00.0")}
    parts = nvbandwidth.parse((OUTPUTS / "nvbandwidth-0.5-good.out").read_text(), two)
    assert [(p.entity, p.result.value, p.version) for p in parts] == [
        (A, 25.92, "v0.5-3-gabcdef0"), (B, 25.90, "v0.5-3-gabcdef0"),
    ]  # fmt: skip


def latency(description: str, name: str = "host_device_latency_sm") -> list[Part]:
    text = (OUTPUTS / "nvbandwidth-0.8-good.out").read_text()
    matrix = [["649.879", "651.0", "800.5"]]
    if name.startswith("device_to_device"):
        matrix = [["N/A", "1100.0", "1200.0"], ["1000.0", "N/A", "1000.0"], ["1000.0", "1300.0", "N/A"]]
    test = {"name": name, "status": "Passed", "bandwidth_matrix": matrix, "sum": 1.0}
    said = json.loads(text[text.index("{") :])
    said["nvbandwidth"]["testcases"] = [
        test | ({"bandwidth_description": description} if description else {})
    ]
    return parse("nvbandwidth", json.dumps(said))


def test_a_latency_is_no_bandwidth() -> None:
    found = latency("memory latency SM CPU(row) <-> GPU(column) (ns) ")
    assert [part.result.value for part in found] == [pytest.approx(v) for v in (0.649879, 0.651, 0.8005)]
    assert {part.result.unit for part in found} == {"us"}
    assert {part.convention for part in found} == {"latency:host_device_latency_sm"}
    among = latency(
        "Device to Device Latency SM GPU(row) <-> GPU(column) (ns)", "device_to_device_latency_sm"
    )
    assert [part.result.value for part in among] == [pytest.approx(v) for v in (1.2, 1.0, 1.3)]
    assert {part.convention for part in among} == {"latency:device_to_device_latency_sm:slowest_of_2"}


@pytest.mark.parametrize("description", ["copies (MB/s)", "copies (%)", "copies", "copies ()"])
def test_what_was_measured_in_something_else_is_no_value(description: str) -> None:
    (part,) = latency(description)
    assert (part.result.status, part.result.value) == ("failed", None)
    assert "which is not known" in part.result.reason


def test_a_card_that_is_not_known_here_is_nobodys() -> None:
    text = (OUTPUTS / "nvbandwidth-0.8-good.out").read_text()
    with pytest.raises(tool.BadTool, match="not known here"):
        nvbandwidth.parse(text, {"0000:18:00.0": A})


def test_dcgm_says_which_card_is_which() -> None:
    text = (OUTPUTS / "dcgmi-discovery.out").read_text()
    assert dcgmi_diag.discovered(text) == NUMBERS
    assert dcgmi_diag.discovered("") == {}
    assert dcgmi_diag.discovered(text.replace("bb", "aa")) == {}


def test_without_them_a_failed_card_is_named_on_the_host() -> None:
    parts = dcgmi_diag.parse((OUTPUTS / "dcgmi_diag-3-good.out").read_text(), {})
    (failed,) = [part for part in parts if part.result.status == "failed"]
    assert (failed.entity, failed.result.reason) == ("node:", "pcie: fail: card 1: link width x8")


@pytest.mark.parametrize(
    "value",
    ["N/A", "nan", "-1", "0", "0.00", "1,5", "1e400", "", "inf", " ", "\u0663", None, True, 0, -3,
     math.nan, math.inf, 1e300, [], {}, "9" * 400],
)  # fmt: skip
def test_what_is_no_bandwidth(value: Any) -> None:
    assert tool.number(value, 1e4) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"a": 1}', "{" * 100_000, '{"nvbandwidth": ' * 50_000,
     '{"x": ' + "9" * 9000 + "}",
     '{"nvbandwidth": null}', '{"nvbandwidth": []}', '{"nvbandwidth": {"testcases": [1, null, {}]}}',
     '{"DCGM Diagnostic": {"test_categories": [{"tests": [{"results": [{}]}]}]}}', '{"fio version": 1}',
     "\0" * 1000, "\ud800"],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
@pytest.mark.parametrize("name", PARSERS)
def test_nonsense_is_no_result(name: str, text: str) -> None:
    try:
        parts = PARSERS[name](text)
    except tool.BadTool:
        return
    assert all(part.result.value is None for part in parts)


def judge(name: str, text: str) -> None:
    """It raises nothing else, and what it gives is a row that the store takes."""
    try:
        parts = PARSERS[name](text)
    except tool.BadTool:
        return
    assert parts
    for part in parts:
        value = part.result.value
        assert (value is not None) == (part.result.status == "ok")
        assert value is None or 0 < value <= MOST[name]
        assert part.result.status in ("ok", "failed", "unsupported")
        assert part.entity == "node:" or re.fullmatch(r"(gpu|port):\S+", part.entity)
        assert re.fullmatch(r"[A-Za-z0-9._:+-]+", part.convention)
        assert re.fullmatch(r"[A-Za-z0-9._+-]*", part.version)
        assert len(part.result.reason) < 400
        assert "\n" not in part.result.reason


CUTS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=12) | st.sampled_from(
        [b"nan", b"-1", b"0", b"N/A", b"1e999", b",", b'"', b"}", b"{", b"[", b"]", b"null", b"\n",
         b"9" * 20])),
    min_size=1, max_size=4,
)  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_damaged_output_is_never_a_value_that_cannot_be(path: Path) -> None:
    whole = path.read_bytes()

    @settings(max_examples=25)
    @given(CUTS)
    def damaged(cuts: list[tuple[float, int, bytes]]) -> None:
        data = whole
        for where, length, put in cuts:
            at = int(where * len(data))
            data = data[:at] + put + data[at + length :]
        judge(path.name.split("-")[0], tool._text(data))

    damaged()


@pytest.mark.parametrize("name", sorted(FOUND))
def test_an_output_that_is_cut_short_has_no_wrong_value(name: str) -> None:
    """Wherever it is cut: what is still a value is one that the whole output has too."""
    text = (OUTPUTS / f"{name}.out").read_text()
    whole = {(p.entity, p.convention, p.result.value) for p in parse(name) if p.result.value is not None}
    for at in range(0, len(text.rstrip()), 7):
        try:
            parts = parse(name, text[:at])
        except tool.BadTool:
            continue
        found = {(p.entity, p.convention, p.result.value) for p in parts if p.result.value is not None}
        assert found <= whole, at


@pytest.mark.parametrize(
    ("said", "status"),
    [("Error: Unable to run diagnostic on unsupported GPU 0.", "unsupported"), ("no", "failed")],
)
@pytest.mark.parametrize("where", ["", ">&2"])
def test_a_diagnostic_that_refuses_the_card_is_unsupported(
    tmp_path: Path, said: str, status: str, where: str
) -> None:
    path = tmp_path / "dcgmi"
    path.write_text(f"#!/bin/sh\necho '{said}' {where}\necho '{{\"DCGM GPU Diagnostic\":{{}}}}'\nexit 1\n")
    path.chmod(0o755)
    at = Place(None, None, str(tmp_path), command=[str(path), "diag", "-j"])
    (part,) = dcgmi_diag.run(at, {})
    assert (part.entity, part.result.status, part.result.value) == ("node:", status, None)
    if status == "unsupported":
        assert part.result.reason == "Unable to run diagnostic on unsupported GPU 0."


def test_tools_are_off_unless_somebody_enables_them() -> None:
    from gpufleet_agent.config import AgentConfig

    assert set(TOOLS) == set(PARSERS)
    assert not any(AgentConfig().bench(name).enabled for name in TOOLS)
    assert all(AgentConfig().tool(name).deadline_s == bench.DEADLINE_S for name, bench in TOOLS.items())
    assert next(metric for metric in METRICS if metric.name == "value").high == 1e15
