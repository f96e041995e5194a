"""The kernel of gemm, run line by line: where each thread writes, and what a wrong bit does to that.

Tensor cores are not played; the variant without them has the same lines but for the instruction itself.
"""

import math
import operator
import re
import struct
from collections.abc import Callable

from gpufleet_agent.drivers import cuda_ptx

WITHOUT = cuda_ptx.MULTIPLIES[-1]
SLOTS = 1 << 40
DO: dict[str, Callable[..., int]] = {
    "ld": operator.pos, "cvta": operator.pos, "mov": operator.pos, "mul": operator.mul, "add": operator.add,
    "sub": operator.sub, "shr": operator.rshift, "xor": operator.xor, "and": operator.and_,
    "or": operator.or_, "mad": lambda left, right, plus: left * right + plus,
}  # fmt: skip

Touch = Callable[[int, float], float]


def as_float(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def as_word(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def run(
    block: int, thread: int, blocks: int, threads: int, loops: int, touch: Touch = lambda at, value: value
) -> tuple[dict[int, int], list[float]]:
    """What one thread writes, by address, and the sums it ends with; `touch` may change any product's sum."""
    body = cuda_ptx.gemm(WITHOUT).partition("{\n")[2]
    lines = [line.strip().rstrip(";") for line in body.splitlines() if ".reg" not in line]
    registers: dict[str, int] = {
        "%tid.x": thread, "%ctaid.x": block, "%ntid.x": threads, "%nctaid.x": blocks, "%smid": 7 + block,
        "[slots]": SLOTS, "[loops]": loops,
    }  # fmt: skip
    written: dict[int, int] = {}
    at = done = 0

    def value(word: str) -> int:
        if word.startswith("0f"):
            return int(word[2:], 16)
        return registers[word] if word in registers else int(word, 0)

    while at < len(lines):
        words = lines[at].replace(",", "").split()
        at += 1
        if not words or words[0] in ("again:", "}"):
            continue
        if words[0] == "@%p1":
            at = lines.index("again:") if registers["%p1"] else at
            continue
        if words[0] == "ret":
            break
        name, to, given = words[0], words[1], words[2:]
        if name == "st.global.u32":
            written[value(re.sub(r"\W*(%rd\d)\W*", r"\1", to))] = value(given[0])
        elif name == "fma.rn.f32":
            left, right, plus = (as_float(value(word)) for word in given)
            registers[to] = as_word(touch(done, left * right + plus))
            done += 1
        elif name == "setp.ne.u32":
            registers[to] = int(value(given[0]) != value(given[1]))
        else:
            result = DO[name.split(".")[0]](*(value(word) for word in given))
            registers[to] = result & (2**64 - 1 if "64" in name or "wide" in name else 2**32 - 1)
    return written, [as_float(registers[f"%f{chain}"]) for chain in range(WITHOUT.chains)]


def word(written: dict[int, int]) -> int:
    """The one that holds all sums: it is written first."""
    return next(iter(written.values()))


def test_every_thread_writes_two_words_of_its_own() -> None:
    blocks, threads = 3, 4
    found: dict[int, int] = {}
    for block in range(blocks):
        for thread in range(threads):
            written, _ = run(block, thread, blocks, threads, 1)
            assert not found.keys() & written.keys()
            found |= written
    assert sorted(found) == [SLOTS + 4 * at for at in range(2 * blocks * threads)]
    places = [found[SLOTS + 4 * at] for at in range(blocks * threads, 2 * blocks * threads)]
    assert places == [8] * 4 + [9] * 4 + [10] * 4


def test_the_work_is_that_of_the_place_in_the_block_alone() -> None:
    first, other = (run(block, 2, 3, 4, 2) for block in (0, 2))
    assert word(first[0]) == word(other[0])
    assert first[1] == other[1]
    assert word(run(0, 3, 3, 4, 2)[0]) != word(first[0])


def test_sums_stay_small_however_long_it_runs() -> None:
    for thread in (0, 1, 255):
        for loops in (1, 40):
            _, sums = run(0, thread, 1, 256, loops)
            assert all(math.isfinite(one) and 0.0 <= abs(one - 1.0) <= 1.01 for one in sums)
            assert len(set(sums)) == len(sums), "no two units do the same"


def test_one_wrong_bit_anywhere_is_in_the_word() -> None:
    right = word(run(0, 5, 1, 256, 2)[0])
    products = WITHOUT.chains * (2 * cuda_ptx.GEMM_TIMES + 1)
    for wrong in range(0, products, 37):

        def touch(at: int, value: float, wrong: int = wrong) -> float:
            return as_float(as_word(value) ^ 1 << 20) if at == wrong else value

        assert word(run(0, 5, 1, 256, 2, touch)[0]) != right, wrong


def test_a_unit_that_is_wrong_the_same_way_each_time_is_in_the_word() -> None:
    """What it adds wrongly it takes away wrongly; the last product is not taken away."""
    right = word(run(0, 5, 1, 256, 2)[0])

    def touch(at: int, value: float) -> float:
        if at % WITHOUT.chains != 3:
            return value
        return value + (0.25 if at // WITHOUT.chains % 2 == 0 else -0.25)

    assert word(run(0, 5, 1, 256, 2, touch)[0]) != right
