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

from gpufleet.metric import Null, Reason
from gpufleet_agent.drivers import NoProgress, cuda, cuda_ptx, link_between

PAIRS = {
    "cuCtxCreate_v2": "cuCtxDestroy_v2",
    "cuStreamCreate": "cuStreamDestroy_v2",
    "cuEventCreate": "cuEventDestroy_v2",
    "cuMemHostAlloc": "cuMemFreeHost",
    "cuMemAlloc_v2": "cuMemFree_v2",
    "cuModuleLoadData": "cuModuleUnload",
    "cuCtxEnablePeerAccess": "cuCtxDisablePeerAccess",
    "cuCtxPushCurrent_v2": "cuCtxPopCurrent_v2",
}


def counts(rig: Any) -> dict[str, tuple[int, int]]:
    """How often each thing was taken and given back. A new context is current until another one is."""
    found = {taken: (rig.count(taken), rig.count(back)) for taken, back in PAIRS.items()}
    pushed, popped = found["cuCtxPushCurrent_v2"]
    second = max(0, rig.count("cuCtxCreate_v2") - rig.count("cuInit"))
    return found | {"cuCtxPushCurrent_v2": (pushed + second, popped)}


def gave_all_back(rig: Any) -> bool:
    left = {text for _, _, text in rig.log("cuCtxDestroy_v2")}
    return all(taken == back for taken, back in counts(rig).values()) and left <= {"left=0"}


@pytest.mark.parametrize(
    ("name", "value", "unit", "convention"),
    [
        ("h2d", 50.0, "GB/s", "copied_once"),
        ("d2h", 50.0, "GB/s", "copied_once"),
        ("hbm", 4000.0, "GB/s", "read_plus_write"),
        ("clock", 1755.0, "MHz", "cycles_over_slowest"),
        ("fma", 4 * 1024 * 2 / 2.02 * 1755e-6, "TFLOPS", "fp32_fma_is_two"),
        ("gemm", 16384 * 1755e-6, "TFLOPS", "mma_m16n8k16_bf16_f32_sm90"),
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
FOR_PAIRS = (
    "cuCtxPushCurrent_v2", "cuCtxSynchronize", "cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess",
    "cuMemcpyPeerAsync",
)  # fmt: skip
USED_BY = {**dict.fromkeys(FOR_PAIRS, "p2p"),
           "cuMemcpyDtoHAsync_v2": "d2h", "cuMemcpyDtoDAsync_v2": "hbm",
           "cuMemcpyHtoDAsync_v2": "h2d",
           "cuMemHostAlloc": "h2d"}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_is_named_and_nothing_is_kept(caller: Any, call: str) -> None:
    found = caller.run(USED_BY.get(call, "clock"), f"fail {call} 719")
    assert found == ("failed", None, f"{call}: CUDA_ERROR_OF_SOME_KIND")
    both = counts(caller.rig)
    if call in PAIRS:
        assert both[call][0] > both[call][1], "the one that failed gave nothing"
        both[call] = (0, 0)
    assert all(taken == back for taken, back in both.values())
    assert {text for _, _, text in caller.rig.log("cuCtxDestroy_v2")} <= {"left=0"}


@pytest.mark.parametrize(
    ("call", "number", "wanted"),
    [("cuMemAlloc_v2", 2, "skipped"), ("cuCtxCreate_v2", 46, "skipped"), ("cuInit", 100, "unsupported"),
     ("cuModuleLoadData", 222, "unsupported"), ("cuDeviceGetByPCIBusId", 101, "unsupported"),
     ("cuModuleLoadData", 209, "unsupported"),
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
     ("copy", "d2h", "what arrived from the card"), ("copy", "hbm", "the copy is not"),
     ("peer", "p2p", "of 4096 bytes sent, others arrived on 0000:11:00.0"),
     ("sum", "gemm", "the same work gave other bits in 1 of 8 blocks, on processors 0"),
     ("block", "gemm", "the same work gave other bits in 1 of 8 blocks, on processors 2"),
     ("nothing", "gemm", "8 of 8 blocks wrote no result")],
)  # fmt: skip
def test_a_card_that_errs_without_a_word_has_no_value(caller: Any, what: str, bench: str, words: str) -> None:
    status, value, reason = caller.run(bench, f"corrupt {what}")
    assert (status, value) == ("failed", None)
    assert reason.startswith("corrupt: ")
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


@pytest.mark.parametrize("bench", ["h2d", "fma", "p2p", "gemm"])
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
    assert rig.count("cuCtxDestroy_v2") == (2 if bench == "p2p" else 1)
    assert rig.log()[-1][0] - told < 1.0


def test_at_sigterm_within_a_call_that_does_not_return_the_process_ends_all_the_same(rig: Any) -> None:
    rig.cuda("block cuEventSynchronize")
    process = rig.start(rig.settings("hbm", force=True))
    rig.wait_for(lambda: rig.count("cuEventSynchronize"))
    process.send_signal(signal.SIGTERM)
    assert rig.rows(process) == []
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("bench", ["h2d", "hbm", "clock", "fma", "p2p", "gemm"])
def test_between_two_looks_at_the_time_a_card_has_little_to_do(caller: Any, bench: str) -> None:
    """What is handed to a card before it is waited for takes about a twentieth of a second at the most."""
    assert caller.run(bench)[0] == "ok"
    assert caller.longest_ms() < 60.0


def test_each_card_sends_to_another_one_and_both_are_kept_from_others(rig: Any) -> None:
    rows = rig.run("p2p")
    first, second = (f"gpu:GPU-00000000-0000-4000-8000-00000000000{slot}" for slot in range(2))
    assert [(row["entity"], row["peer"], row["link"]) for row in rows] == [
        (first, second, "pcie:10:00>11:00"), (second, first, "pcie:11:00>10:00"),
    ]  # fmt: skip
    for row in rows:
        assert (row["status"], row["unit"], row["convention"]) == ("ok", "GB/s", "copied_once")
        assert row["value"] == pytest.approx(380, rel=0.005)
        assert 0 < row["gpu_seconds"] == row["seconds"]
    assert [text for _, _, text in rig.log("cuDeviceCanAccessPeer")] == ["0 1", "1 0"]
    assert {int(text) for _, _, text in rig.log("cuMemcpyPeerAsync")} == {4096, 65536, 1 << 20, 64 << 20}
    assert gave_all_back(rig)
    assert rig.count("cuCtxDestroy_v2") == 4


def test_cards_that_do_not_reach_each_other_are_no_failure(rig: Any) -> None:
    rig.cuda("no_peer")
    rows = rig.run("p2p")
    assert [(row["status"], row["value"]) for row in rows] == [("unsupported", None)] * 2
    assert "cuDeviceCanAccessPeer: no: neither NVLink nor PCIe" in rows[0]["reason"]
    assert gave_all_back(rig)
    assert rig.count("cuCtxCreate_v2") == 2, "the other card was left alone"


def test_a_pair_with_a_card_that_is_left_alone_is_not_run(rig: Any) -> None:
    rows = rig.run("p2p", skip=[{"pci": "0000:11:00.0", "uuid": "GPU-other", "index": 1}])
    assert [row["status"] for row in rows] == ["skipped", "skipped"]
    assert rig.count("cuInit") == 0


@pytest.mark.parametrize(
    ("architecture", "convention", "since"),
    [(61, "fma_f32_sm61", 50), (70, "mma_m8n8k4_f16_f32_sm70", 70), (75, "mma_m16n8k8_f16_f32_sm75", 75),
     (89, "mma_m16n8k16_bf16_f32_sm89", 80), (120, "mma_m16n8k16_bf16_f32_sm120", 80)],
)  # fmt: skip
def test_the_best_instruction_of_a_card_is_in_the_key_of_its_series(
    rig: Any, architecture: int, convention: str, since: int
) -> None:
    rig.cuda(f"arch {architecture}")
    rows = rig.run("gemm", entity="gpu:GPU-00000000-0000-4000-8000-000000000000")
    assert [(row["status"], row["convention"]) for row in rows] == [("ok", convention)]
    assert f".target sm_{since}\n" in cuda_ptx.gemm(cuda_ptx.multiply(architecture))


DIRECT = [{"remote_kind": "gpu", "remote_pci": "0000:43:00.0"}]
SWITCH = [{"remote_kind": "switch", "remote_pci": "0000:07:00.0"}]
DOWN = [{"remote_kind": Null(Reason.NOT_READ), "remote_pci": Null(Reason.NOT_READ)}]


@pytest.mark.parametrize(
    ("mine", "theirs", "wanted"),
    [(DIRECT, DOWN, "nvlink"), (SWITCH, SWITCH, "nvlink"), (SWITCH, DOWN, "pcie"), (DOWN, DOWN, "pcie"),
     ([], [], "pcie"), (Null(Reason.NOT_SUPPORTED), SWITCH, "pcie")],
)  # fmt: skip
def test_what_lies_between_two_cards(mine: Any, theirs: Any, wanted: str) -> None:
    assert link_between(mine, theirs, "0000:43:00.0") == wanted


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


@pytest.mark.parametrize("ptx", [cuda_ptx.CLOCK, cuda_ptx.FMA])
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


@pytest.mark.parametrize("multiply", cuda_ptx.MULTIPLIES, ids=lambda one: one.name)
def test_matrices_are_multiplied_out_of_declared_registers(multiply: cuda_ptx.Multiply) -> None:
    ptx = cuda_ptx.gemm(multiply)
    head = f".version {multiply.version}\n.target sm_{multiply.since}\n.address_size 64\n"
    assert ptx.startswith(head)
    assert ptx.isascii()
    ranges = {prefix: int(count) for prefix, count in re.findall(r"\.reg \.\w+ %(\w+?)<(\d+)>;", ptx)}
    assert ranges["f"] == multiply.sums * multiply.chains
    assert sum(ranges.values()) < 128, "as many threads as are started find room for their registers"
    body = ptx[ptx.index("    ld.param") :]
    for prefix, number in re.findall(r"%(f|rd|r|a|b|n)(\d+)\b", body):
        assert int(number) < ranges[prefix]
    opcodes = {line.strip().split()[0] for line in body.splitlines() if line.strip().endswith(";")}
    assert opcodes <= {
        "ld.param.u64", "ld.param.u32", "cvta.to.global.u64", "mov.u32", "mov.f32", "mov.b32", "mad.lo.u32",
        "mul.wide.u32", "mul.lo.u32", "add.s64", "add.u32", "and.b32", "or.b32", "xor.b32", "shr.u32",
        "sub.u32", "setp.ne.u32", "@%p1", "st.global.u32", "ret;", multiply.opcode,
    }  # fmt: skip
    written = set(re.findall(r"^\s+(?!st)[\w.]+ (%\w+),", body, re.M))
    assert set(re.findall(r"%(?:f|rd|r|a|b|n)\d+|%p1", body)) == written, "what is read was set before"
    assert "%ctaid" not in body.partition("mad.lo.u32 %r6")[2], "no block's work depends on which one it is"


@pytest.mark.parametrize("multiply", cuda_ptx.MULTIPLIES, ids=lambda one: one.name)
def test_what_a_turn_adds_it_takes_away_and_one_product_stays(multiply: cuda_ptx.Multiply) -> None:
    ptx = cuda_ptx.gemm(multiply)
    begin, _, rest = ptx.partition("again:")
    loop, _, end = rest.partition("@%p1 bra again;")
    calls = [re.findall(r"%\w\d+", line) for line in loop.splitlines() if multiply.opcode in line]
    assert {len(one) for one in calls} == {2 * multiply.sums + multiply.left + multiply.right}
    assert len(calls) == multiply.chains * cuda_ptx.GEMM_TIMES
    added = [one for one in calls if "%a0" in one]
    assert len(added) == len(calls) // 2
    assert [[word.replace("n", "a") for word in one] for one in calls if one not in added] == added
    last = [re.findall(r"%\w\d+", line) for line in end.splitlines() if multiply.opcode in line]
    assert last == added[: multiply.chains]
    for call in calls:
        assert call[: multiply.sums] == call[-multiply.sums :], "a sum stays where it is"
    assert begin.count(" or.b32") == multiply.left + multiply.right * multiply.chains
    assert multiply.digits & multiply.size == 0
    assert multiply.sign & ~multiply.digits == 0


def test_the_work_of_a_turn() -> None:
    """By the shapes in the instructions' names; Volta's is done by each quarter of a warp."""
    for multiply in cuda_ptx.MULTIPLIES:
        shape = re.search(r"m(\d+)n(\d+)k(\d+)", multiply.opcode)
        pairs = 32 if shape is None else int(shape[1]) * int(shape[2]) * int(shape[3])
        assert multiply.pairs == (4 * pairs if "m8n8k4" in multiply.opcode else pairs)
        assert multiply.flop == 2 * multiply.pairs * multiply.chains * cuda_ptx.GEMM_TIMES
    assert [one.since for one in cuda_ptx.MULTIPLIES] == [80, 75, 70, 50]


@given(st.integers(-10, 10**6))
def test_any_architecture_has_an_instruction(architecture: int) -> None:
    found = cuda_ptx.multiply(architecture)
    assert found.since <= max(architecture, 50)


def test_the_signatures_are_of_the_widths_that_the_library_wants() -> None:
    assert ctypes.sizeof(cuda._Pointer) == 8
    assert len(cuda.SIGNATURES["cuLaunchKernel"]) == 11
