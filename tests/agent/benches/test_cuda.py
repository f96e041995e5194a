"""CUDA benches on a made driver library: arguments, failures, what is given back, yielding.

A person asks for these runs, so that they do not wait at the gate.
"""

import ctypes
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet_agent.drivers import NoProgress, cuda

PAIRS = {
    "cuCtxCreate_v2": "cuCtxDestroy_v2",
    "cuStreamCreate": "cuStreamDestroy_v2",
    "cuEventCreate": "cuEventDestroy_v2",
    "cuMemHostAlloc": "cuMemFreeHost",
    "cuMemAlloc_v2": "cuMemFree_v2",
    "cuModuleLoadData": "cuModuleUnload",
}


def gave_all_back(rig: Any) -> bool:
    return all(rig.count(taken) == rig.count(given_back) for taken, given_back in PAIRS.items())


@pytest.mark.parametrize(
    ("name", "value", "unit", "convention"),
    [
        ("h2d", 50.0, "GB/s", "copied_once"),
        ("d2h", 50.0, "GB/s", "copied_once"),
        ("hbm", 4000.0, "GB/s", "read_plus_write"),
        ("clock", 1755.0, "MHz", "cycles_over_slowest"),
        ("fma", 4 * 1024 * 2 / 2.02 * 1755e-6, "TFLOPS", "fp32_fma_is_two"),
    ],
)
def test_a_bench_measures_each_card_and_gives_everything_back(
    rig: Any, name: str, value: float, unit: str, convention: str
) -> None:
    rows = rig.run(name)
    assert [(row["status"], row["unit"], row["convention"]) for row in rows] == [("ok", unit, convention)] * 2
    assert [row["entity"][-2:] for row in rows] == ["00", "01"]
    for row in rows:
        assert row["value"] == pytest.approx(value, rel=0.005)
        assert 0 < row["gpu_seconds"] == row["seconds"]
    assert [text for _, _, text in rig.log("cuDeviceGetByPCIBusId")] == ["0000:10:00.0", "0000:11:00.0"]
    assert gave_all_back(rig)
    assert rig.count("cuCtxDestroy_v2") == 2
    assert rig.log()[-1][1] == "cuCtxDestroy_v2"


def test_memory_is_pinned_on_the_processors_near_the_card(rig: Any) -> None:
    rig.run("h2d")
    assert {text for _, _, text in rig.log("cuMemHostAlloc")} == {f"{64 << 20} 1 cpus=1"}


def test_where_nearness_cannot_be_had_it_is_another_series(rig: Any) -> None:
    for slot in (16, 17):
        (rig.root / f"sys/bus/pci/devices/0000:{slot:02x}:00.0/local_cpulist").unlink()
    assert {row["convention"] for row in rig.run("h2d")} == {"copied_once_anywhere"}


def test_cards_that_are_left_alone_are_hidden_from_the_library(rig: Any) -> None:
    rows = rig.run("clock", skip=[{"pci": "0000:11:00.0", "uuid": "GPU-other", "index": 1}])
    assert [row["status"] for row in rows] == ["ok", "skipped"]
    assert {text for _, _, text in rig.log("cuInit")} == {"0 GPU-00000000-0000-4000-8000-000000000000"}


CALLS = [name for name in cuda.SIGNATURES if name not in (*PAIRS.values(), "cuGetErrorName")]
USED_BY = {"cuMemcpyDtoHAsync_v2": "d2h", "cuMemcpyDtoDAsync_v2": "hbm", "cuMemcpyHtoDAsync_v2": "h2d",
           "cuMemHostAlloc": "h2d"}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_is_named_and_nothing_is_kept(caller: Any, call: str) -> None:
    found = caller.run(USED_BY.get(call, "clock"), f"fail {call} 719")
    assert found == ("failed", None, f"{call}: CUDA_ERROR_OF_SOME_KIND")
    taken = {name: caller.rig.count(name) for name in PAIRS}
    if call in PAIRS:
        taken[call] = min(taken[call], caller.rig.count(PAIRS[call]))  # the one that failed gave nothing
    assert taken == {name: caller.rig.count(PAIRS[name]) for name in PAIRS}


@pytest.mark.parametrize(
    ("call", "number", "wanted"),
    [("cuMemAlloc_v2", 2, "skipped"), ("cuCtxCreate_v2", 46, "skipped"), ("cuInit", 100, "unsupported"),
     ("cuModuleLoadData", 222, "unsupported"), ("cuDeviceGetByPCIBusId", 101, "unsupported"),
     ("cuInit", 999, "failed"), ("cuInit", 802, "failed"), ("cuEventSynchronize", 214, "failed")],
)  # fmt: skip
def test_what_a_failure_means(caller: Any, call: str, number: int, wanted: str) -> None:
    status, value, reason = caller.run("clock", f"fail {call} {number}")
    assert (status, value) == (wanted, None)
    assert call in reason


def test_what_cannot_be_given_back_goes_with_the_context(caller: Any) -> None:
    assert caller.run("h2d", "fail cuMemFree_v2 999", "fail cuMemFreeHost 999")[0] == "ok"
    assert caller.rig.log()[-1][1] == "cuCtxDestroy_v2"


@pytest.mark.parametrize(
    ("what", "bench", "words"),
    [("sum", "fma", "the same work gave other bits in 1 of"), ("copy", "h2d", "what arrived on the card"),
     ("copy", "d2h", "what arrived from the card"), ("copy", "hbm", "the copy is not")],
)  # fmt: skip
def test_a_card_that_errs_without_a_word_has_no_value(caller: Any, what: str, bench: str, words: str) -> None:
    status, value, reason = caller.run(bench, f"corrupt {what}")
    assert (status, value) == ("failed", None)
    assert words in reason
    assert gave_all_back(caller.rig)


def test_a_slow_link_is_copied_over_in_short_turns(caller: Any) -> None:
    assert caller.run("h2d", "rate 0.5") == ("ok", pytest.approx(0.5, rel=1e-3), "")
    assert caller.rig.count("cuMemcpyHtoDAsync_v2") == 2 + 3 + 5


def test_without_the_library_a_bench_says_why_it_cannot() -> None:
    card = cuda.Card("0000:10:00.0", (), Path("/nowhere"))
    if not isinstance(cuda.load(()), str):
        pytest.skip("there is a driver here")
    result = cuda.run_bench("h2d", {}, card, NoProgress(), lambda: None)
    assert (result.status, result.value) == ("unsupported", None)
    assert "libcuda.so.1 cannot be loaded" in result.reason


@pytest.mark.parametrize("bench", ["h2d", "fma"])
def test_at_sigterm_everything_is_given_back_within_a_second(rig: Any, bench: str) -> None:
    rig.cuda("slow cuEventSynchronize 60000")
    process = rig.start(rig.settings(bench, force=True))
    rig.wait_for(lambda: rig.count("cuEventSynchronize") >= 3)
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    rows = rig.rows(process)
    assert process.returncode == 0
    assert [(row["status"], row["value"], row["reason"]) for row in rows] == [
        ("preempted", None, "told to stop"), ("skipped", None, "told to stop"),
    ]  # fmt: skip
    assert gave_all_back(rig)
    assert rig.log()[-1][0] - told < 1.0


def test_at_sigterm_within_a_call_that_does_not_return_the_process_ends_all_the_same(rig: Any) -> None:
    rig.cuda("block cuEventSynchronize")
    process = rig.start(rig.settings("hbm", force=True))
    rig.wait_for(lambda: rig.count("cuEventSynchronize"))
    process.send_signal(signal.SIGTERM)
    assert rig.rows(process) == []
    assert process.returncode == 128 + signal.SIGTERM


@given(st.text(max_size=40))
def test_any_text_is_a_list_of_processors_or_none(text: str) -> None:
    assert all(0 <= cpu < 65536 for cpu in cuda.cpus(text))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("3-1", set()), ("0-99999999", set()),
     ("a", set())],
)  # fmt: skip
def test_lists_of_processors(text: str, wanted: set[int]) -> None:
    assert cuda.cpus(text) == wanted


@pytest.mark.parametrize("ptx", [cuda.CLOCK_PTX, cuda.FMA_PTX])
def test_kernels_use_what_they_declare_and_nothing_newer(ptx: str) -> None:
    """No compiler for PTX is here: at least the form of what is sent to one is checked."""
    assert ptx.startswith(".version 6.0\n.target sm_50\n.address_size 64\n")
    assert ptx.isascii()
    ranges = {prefix: int(count) for prefix, count in re.findall(r"\.reg \.\w+ %(\w+?)<(\d+)>;", ptx)}
    single = set(re.findall(r"%(p1|fa|fb)\b", ptx))
    body = ptx[ptx.index("    ld.param") :]
    for prefix, number in re.findall(r"%(f|r|rd)(\d+)\b", body):
        assert int(number) < ranges[prefix]
    assert single == {"p1", "fa", "fb"}
    opcodes = {line.strip().split()[0] for line in body.splitlines() if line.strip().endswith(";")}
    assert opcodes <= {
        "ld.param.u64", "ld.param.u32", "cvta.to.global.u64", "mov.u32", "mov.u64", "mov.f32", "mad.lo.u32",
        "mul.wide.u32", "add.s64", "sub.s64", "cvt.rn.f32.u32", "cvt.u32.u64", "add.f32", "fma.rn.f32",
        "sub.u32", "setp.ne.u32", "@%p1", "st.global.f32", "st.global.u32", "ret;",
    }  # fmt: skip
    assert body.count("again:") == 1
    written = set(re.findall(r"^\s+(?!st)[\w.]+ (%\w+),", body, re.M))
    assert set(re.findall(r"%(?:f|r|rd)\d+|%fa|%fb|%p1", body)) == written


def test_the_signatures_are_of_the_widths_that_the_library_wants() -> None:
    assert ctypes.sizeof(cuda._Pointer) == 8
    assert len(cuda.SIGNATURES["cuLaunchKernel"]) == 11
