"""The kernels of the CUDA benches, as PTX of the oldest version that has what they use.

The driver compiles it for its cards, also for those that are newer than this text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CLOCK_TIMES = 64
FMA_CHAINS, FMA_TIMES = 8, 32


def _chains(name: str, chains: int, times: int, before: Sequence[str], after: Sequence[str]) -> str:
    """A kernel in which each thread runs a loop of multiply-adds: `chains` of them, each `times` long.

    Its parameters: address of one 8-byte slot per thread, and how often the loop runs (at least once).
    """
    chain = [f"%f{at + 1}" for at in range(chains)]
    begin = [
        f"add.f32 {one}, {before_one}, 0f3F800000;"  # 1.0: no two chains are alike
        for before_one, one in zip(["%f0", *chain], chain, strict=False)
    ]
    # x * 0.99999905 + 0.000001: never leaves the ordinary numbers
    body = [f"fma.rn.f32 {one}, {one}, %fa, %fb;" for one in chain] * times
    total = [f"add.f32 %f0, %f0, {one};" for one in chain]
    lines = [
        ".reg .pred %p1;",
        f".reg .f32 %f<{chains + 1}>;",
        ".reg .f32 %fa, %fb;",
        ".reg .b32 %r<6>;",
        ".reg .b64 %rd<8>;",
        "ld.param.u64 %rd1, [slots];",
        "ld.param.u32 %r1, [loops];",
        "cvta.to.global.u64 %rd2, %rd1;",
        "mov.u32 %r2, %tid.x;",
        "mov.u32 %r3, %ctaid.x;",
        "mov.u32 %r4, %ntid.x;",
        "mad.lo.u32 %r5, %r3, %r4, %r2;",
        "mul.wide.u32 %rd3, %r5, 8;",
        "add.s64 %rd4, %rd2, %rd3;",
        "cvt.rn.f32.u32 %f0, %r5;",
        "mov.f32 %fa, 0f3F7FFFF0;",
        "mov.f32 %fb, 0f358637BD;",
        *begin,
        *before,
        "again:",
        *body,
        "sub.u32 %r1, %r1, 1;",
        "setp.ne.u32 %p1, %r1, 0;",
        "@%p1 bra again;",
        *after,
        *total,
        "st.global.f32 [%rd4], %f0;",
        "ret;",
    ]
    return _entry(name, "6.0", 50, lines)


@dataclass(frozen=True, slots=True)
class Multiply:
    """An instruction that multiplies two small matrices and adds the product to a third, all in registers.

    Attributes:
        name: Shape, type of the factors and of the sum, for the series' key.
        since: Oldest architecture that has it (major * 10 + minor).
        version: Of PTX that has it.
        opcode: In PTX.
        left, right, sums: Registers per thread of the two factors and of the sum.
        pairs: Multiply-adds of one instruction of a warp.
        digits, size, sign: Which bits of a register of a factor are drawn, those that hold its numbers
            between a half and one, and their signs.
        chains: So many sums at once that no unit waits for one.
    """

    name: str
    since: int
    version: str
    opcode: str
    left: int
    right: int
    sums: int
    pairs: int
    digits: int
    size: int
    sign: int
    chains: int

    @property
    def flop(self) -> int:
        """Of one warp and one turn of the loop; a multiply-add counts two."""
        return 2 * self.pairs * self.chains * GEMM_TIMES


GEMM_TIMES = 16
"""Even: what one half of a turn of the loop adds, the other takes away."""

_BF16, _F16 = (0x807F807F, 0x3F003F00, 0x80008000), (0x83FF83FF, 0x38003800, 0x80008000)
_F32 = (0x807FFFFF, 0x3F000000, 0x80000000)

MULTIPLIES = (
    Multiply(
        "mma_m16n8k16_bf16_f32", 80, "7.0", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        4, 2, 4, 16 * 8 * 16, *_BF16, 8,
    ),
    Multiply(
        "mma_m16n8k8_f16_f32", 75, "6.5", "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
        2, 1, 4, 16 * 8 * 8, *_F16, 8,
    ),
    # of Volta's, four quarters of a warp do one each
    Multiply(
        "mma_m8n8k4_f16_f32", 70, "6.4", "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        2, 2, 8, 4 * 8 * 8 * 4, *_F16, 4,
    ),
    Multiply("fma_f32", 50, "6.0", "fma.rn.f32", 1, 1, 1, 32, *_F32, 16),
)  # fmt: skip
"""Newest first. What is older than tensor cores multiplies without."""


def multiply(architecture: int) -> Multiply:
    """The best that an architecture (major * 10 + minor) has."""
    return next((one for one in MULTIPLIES if one.since <= architecture), MULTIPLIES[-1])


def gemm(of: Multiply) -> str:
    """A kernel in which every warp multiplies, out of registers alone; each block does the very same work.

    The factors are drawn from the thread's place in its block, and stay. A sum grows by a product and loses
    it again, so that it remains small and an error of one turn is still in it at the end; a last product,
    which is not taken away, shows what errs the same way each time. The bits of all sums are folded into one
    word, in which no single change of one of them is lost.

    Its parameters: address of two words per thread (first the folded words of all threads, then for each the
    number of the processor that it ran on, plus one), and how often the loop runs (at least once).
    """
    left = [f"%a{at}" for at in range(of.left)]
    taken = [f"%n{at}" for at in range(of.left)]
    right = [[f"%b{chain * of.right + at}" for at in range(of.right)] for chain in range(of.chains)]
    sums = [[f"%f{chain * of.sums + at}" for at in range(of.sums)] for chain in range(of.chains)]
    drawn: list[str] = []
    for one in (*left, *(register for chain in right for register in chain)):
        drawn += [
            "mad.lo.u32 %r6, %r6, 1664525, 1013904223;",
            "shr.u32 %r7, %r6, 15;",
            "xor.b32 %r7, %r7, %r6;",
            f"and.b32 %r7, %r7, 0x{of.digits:08X};",
            f"or.b32 {one}, %r7, 0x{of.size:08X};",
        ]
    drawn += [f"xor.b32 {minus}, {plus}, 0x{of.sign:08X};" for plus, minus in zip(left, taken, strict=True)]
    every = [register for chain in sums for register in chain]

    def whole(registers: list[str]) -> str:
        return f"{{{', '.join(registers)}}}" if of.opcode.startswith("mma") else registers[0]

    def turn(factor: list[str]) -> list[str]:
        return [
            f"{of.opcode} {', '.join(map(whole, (chain, factor, right[at], chain)))};"
            for at, chain in enumerate(sums)
        ]

    folded = [
        line
        for one in every
        for line in (f"mov.b32 %r7, {one};", "xor.b32 %r6, %r6, %r7;", "mul.lo.u32 %r6, %r6, 16777619;")
    ]
    lines = [
        ".reg .pred %p1;",
        f".reg .f32 %f<{len(every)}>;",
        f".reg .b32 %a<{of.left}>;",
        f".reg .b32 %n<{of.left}>;",
        f".reg .b32 %b<{of.right * of.chains}>;",
        ".reg .b32 %r<10>;",
        ".reg .b64 %rd<7>;",
        "ld.param.u64 %rd1, [slots];",
        "ld.param.u32 %r1, [loops];",
        "cvta.to.global.u64 %rd2, %rd1;",
        "mov.u32 %r2, %tid.x;",
        "mov.u32 %r3, %ctaid.x;",
        "mov.u32 %r4, %ntid.x;",
        "mad.lo.u32 %r5, %r3, %r4, %r2;",
        "mul.wide.u32 %rd3, %r5, 4;",
        "add.s64 %rd4, %rd2, %rd3;",
        "mad.lo.u32 %r6, %r2, 747796405, 277803737;",
        *drawn,
        *(f"mov.f32 {one}, 0f3F800000;" for one in every),
        "again:",
        *(turn(left) + turn(taken)) * (GEMM_TIMES // 2),
        "sub.u32 %r1, %r1, 1;",
        "setp.ne.u32 %p1, %r1, 0;",
        "@%p1 bra again;",
        *turn(left),
        "mov.u32 %r6, 40389;",
        *folded,
        "st.global.u32 [%rd4], %r6;",
        "mov.u32 %r8, %nctaid.x;",
        "mul.lo.u32 %r8, %r8, %r4;",
        "mul.wide.u32 %rd5, %r8, 4;",
        "add.s64 %rd6, %rd4, %rd5;",
        "mov.u32 %r9, %smid;",
        "add.u32 %r9, %r9, 1;",
        "st.global.u32 [%rd6], %r9;",
        "ret;",
    ]
    return _entry("gpufleet_gemm", of.version, of.since, lines)


def _entry(name: str, version: str, since: int, lines: Sequence[str]) -> str:
    head = f".version {version}\n.target sm_{since}\n.address_size 64\n\n.visible .entry {name}(\n"
    text = "\n".join(f"    {line}" if not line.endswith(":") else line for line in lines)
    return f"{head}    .param .u64 slots,\n    .param .u32 loops\n)\n{{\n{text}\n}}\n"


CLOCK = _chains(
    "gpufleet_clock", 1, CLOCK_TIMES, ["mov.u64 %rd5, %clock64;"],
    ["mov.u64 %rd6, %clock64;", "sub.s64 %rd7, %rd6, %rd5;", "cvt.u32.u64 %r2, %rd7;",
     "st.global.u32 [%rd4+4], %r2;"],
)  # fmt: skip
"""One chain, so that nothing runs beside it; beside the sum, the cycles it took."""

FMA = _chains("gpufleet_fma", FMA_CHAINS, FMA_TIMES, [], [])
"""So many chains that no unit waits for a result; the sum has to come out the same each time."""
