"""The cards that can be simulated, and what makes one board differ from the next.

Figures are those that nvidia-smi shows on real ones. Everything of a board comes from the scenario's seed,
its host and its slot by hash, so that every process that plays a scenario sees the same board.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """One model of card.

    Attributes:
        name: As the driver says it.
        device_id: PCI device, four hex digits.
        pci_class: 0302 for a card without a screen, 0300 for one with.
        arch: NVIDIA's word.
        mem_bytes: Memory.
        sm_clock_max_mhz: Largest SM clock that the driver names.
        sm_clock_busy_mhz: What a healthy card holds under a steady load.
        sm_clock_idle_mhz: When idle.
        mem_clock_max_mhz: Memory clock under load.
        mem_clock_idle_mhz: When idle.
        idle_pstate: 0 on cards with HBM, 8 on others.
        pcie_gen: Of card and slot.
        pcie_gen_idle: When idle; cards with HBM keep theirs.
        power_limit_w: Default limit.
        power_busy_w: Under a steady load.
        power_idle_w: When idle.
        power_capped: A steady load runs into the power limit, which is normal.
        slowdown_c: Temperature at which hardware cuts the clock.
        warm_c: Temperature under a steady load.
        hbm: Has a memory temperature.
        has_margin: Tells the distance to the slowdown temperature (Ada and newer).
        has_serial: Not on GeForce.
        part_number: Of the board; empty where the driver gives none.
        vbios: Version.
        ecc: Counts memory errors.
        banks: Memory banks whose rows can be remapped; 0 = none can.
        mig: Can be split into instances.
        fabric: Joins an NVLink fabric.
        nvlink: Generation of its NVLinks; empty where it has none.
        nvlinks: How many it has.
        nvlinks_wired: How many of them lead somewhere: to a switch, or over a bridge to the card beside it.
        nvlink_to: switch or gpu.
        own_memory: Has memory of its own; False where it shares the host's, and its bus too.
        guest: A share of a card in a virtual machine, which has few sensors.
        infiniband_gbps: Of the InfiniBand port that its host has for each card; 0 = none.
    """

    name: str
    device_id: str
    pci_class: str
    arch: str
    mem_bytes: int
    sm_clock_max_mhz: int
    sm_clock_busy_mhz: int
    sm_clock_idle_mhz: int
    mem_clock_max_mhz: int
    mem_clock_idle_mhz: int
    idle_pstate: int
    pcie_gen: int
    pcie_gen_idle: int
    power_limit_w: float
    power_busy_w: float
    power_idle_w: float
    power_capped: bool
    slowdown_c: float
    warm_c: float
    hbm: bool
    has_margin: bool
    has_serial: bool
    part_number: str
    vbios: str
    ecc: bool = True
    banks: int = 0
    mig: bool = False
    fabric: bool = False
    nvlink: str = ""
    nvlinks: int = 0
    nvlinks_wired: int = 0
    nvlink_to: str = "switch"
    own_memory: bool = True
    guest: bool = False
    infiniband_gbps: int = 0


_H100 = Model(
    name="NVIDIA H100 80GB HBM3", device_id="2330", pci_class="0302", arch="Hopper", mem_bytes=81559 * _MIB,
    sm_clock_max_mhz=1980, sm_clock_busy_mhz=1755, sm_clock_idle_mhz=345,
    mem_clock_max_mhz=2619, mem_clock_idle_mhz=2619,
    idle_pstate=0, pcie_gen=5, pcie_gen_idle=5,
    power_limit_w=700.0, power_busy_w=686.0, power_idle_w=71.0, power_capped=True,
    slowdown_c=89.0, warm_c=63.0, hbm=True, has_margin=True, has_serial=True,
    part_number="692-2G520-0200-000", vbios="96.00.89.00.01", banks=2560, mig=True, fabric=True,
    nvlink="4.0", nvlinks=18, nvlinks_wired=18, infiniband_gbps=400,
)  # fmt: skip
_H200 = Model(
    name="NVIDIA H200", device_id="2335", pci_class="0302", arch="Hopper", mem_bytes=143771 * _MIB,
    sm_clock_max_mhz=1980, sm_clock_busy_mhz=1740, sm_clock_idle_mhz=345,
    mem_clock_max_mhz=3201, mem_clock_idle_mhz=3201,
    idle_pstate=0, pcie_gen=5, pcie_gen_idle=5,
    power_limit_w=700.0, power_busy_w=684.0, power_idle_w=76.0, power_capped=True,
    slowdown_c=89.0, warm_c=64.0, hbm=True, has_margin=True, has_serial=True,
    part_number="692-2G520-0280-501", vbios="96.00.BC.00.01", banks=3072, mig=True, fabric=True,
    nvlink="4.0", nvlinks=18, nvlinks_wired=18, infiniband_gbps=400,
)  # fmt: skip
_A100 = Model(
    name="NVIDIA A100-SXM4-80GB", device_id="20b2", pci_class="0302", arch="Ampere", mem_bytes=81920 * _MIB,
    sm_clock_max_mhz=1410, sm_clock_busy_mhz=1395, sm_clock_idle_mhz=210,
    mem_clock_max_mhz=1593, mem_clock_idle_mhz=1593,
    idle_pstate=0, pcie_gen=4, pcie_gen_idle=4,
    power_limit_w=400.0, power_busy_w=388.0, power_idle_w=62.0, power_capped=True,
    slowdown_c=89.0, warm_c=61.0, hbm=True, has_margin=False, has_serial=True,
    part_number="692-2G506-0210-002", vbios="92.00.45.00.03", banks=640, mig=True,
    nvlink="3.0", nvlinks=12, nvlinks_wired=12, infiniband_gbps=200,
)  # fmt: skip
_RTX4090 = Model(
    name="NVIDIA GeForce RTX 4090", device_id="2684", pci_class="0300", arch="Ada", mem_bytes=24564 * _MIB,
    sm_clock_max_mhz=3105, sm_clock_busy_mhz=2640, sm_clock_idle_mhz=210,
    mem_clock_max_mhz=10501, mem_clock_idle_mhz=405,
    idle_pstate=8, pcie_gen=4, pcie_gen_idle=1,
    power_limit_w=450.0, power_busy_w=392.0, power_idle_w=17.0, power_capped=False,
    slowdown_c=90.0, warm_c=66.0, hbm=False, has_margin=True, has_serial=False,
    part_number="", vbios="95.02.3C.40.B8", ecc=False,
)  # fmt: skip
_T4 = Model(
    name="Tesla T4", device_id="1eb8", pci_class="0302", arch="Turing", mem_bytes=15360 * _MIB,
    sm_clock_max_mhz=1590, sm_clock_busy_mhz=1095, sm_clock_idle_mhz=300,
    mem_clock_max_mhz=5001, mem_clock_idle_mhz=405,
    idle_pstate=8, pcie_gen=3, pcie_gen_idle=1,
    power_limit_w=70.0, power_busy_w=68.5, power_idle_w=9.5, power_capped=True,
    slowdown_c=93.0, warm_c=70.0, hbm=False, has_margin=False, has_serial=True,
    part_number="900-2G183-0000-001", vbios="90.04.96.00.02",
)  # fmt: skip

_GH200 = replace(
    _H100, name="NVIDIA GH200 480GB", device_id="2342", mem_bytes=97871 * _MIB, fabric=False,
    nvlink="", nvlinks=0, nvlinks_wired=0,
    power_limit_w=900.0, power_busy_w=640.0, power_capped=False, part_number="699-2G530-0200-300",
    vbios="96.00.68.00.02",
)  # fmt: skip
# of these three, clocks and power under load are estimates
_B200 = replace(
    _H200, name="NVIDIA B200", device_id="2901", arch="Blackwell", mem_bytes=183359 * _MIB,
    sm_clock_max_mhz=1965, sm_clock_busy_mhz=1830, mem_clock_max_mhz=3996, mem_clock_idle_mhz=3996,
    power_limit_w=1000.0, power_busy_w=968.0, power_idle_w=141.0, part_number="", vbios="", nvlink="5.0",
)  # fmt: skip
_H100_NVL = replace(
    _H100, name="NVIDIA H100 NVL", device_id="2321", mem_bytes=95830 * _MIB, fabric=False,
    sm_clock_max_mhz=1785, sm_clock_busy_mhz=1620, power_limit_w=400.0, power_busy_w=391.0, power_idle_w=62.0,
    part_number="", vbios="", nvlinks_wired=12, nvlink_to="gpu",
)  # fmt: skip
_A100_PCIE = replace(
    _A100, name="NVIDIA A100 80GB PCIe", device_id="20b5", mem_clock_max_mhz=1512, mem_clock_idle_mhz=1512,
    sm_clock_busy_mhz=1290, power_limit_w=300.0, power_busy_w=293.0, power_idle_w=45.0,
    part_number="", vbios="", nvlinks_wired=0, nvlink_to="gpu",
)  # fmt: skip
_L40S = Model(
    name="NVIDIA L40S", device_id="26b9", pci_class="0302", arch="Ada", mem_bytes=46068 * _MIB,
    sm_clock_max_mhz=2520, sm_clock_busy_mhz=2355, sm_clock_idle_mhz=210,
    mem_clock_max_mhz=9001, mem_clock_idle_mhz=405,
    idle_pstate=8, pcie_gen=4, pcie_gen_idle=1,
    power_limit_w=350.0, power_busy_w=343.0, power_idle_w=35.0, power_capped=True,
    slowdown_c=92.0, warm_c=68.0, hbm=False, has_margin=True, has_serial=True,
    part_number="900-2G133-0080-000", vbios="95.02.66.00.02", banks=192,
)  # fmt: skip
_RTX6000 = replace(
    _L40S, name="NVIDIA RTX 6000 Ada Generation", device_id="26b1", pci_class="0300",
    sm_clock_max_mhz=3105, sm_clock_busy_mhz=2505, mem_clock_max_mhz=10001, mem_bytes=49140 * _MIB,
    power_limit_w=300.0, power_busy_w=291.0, power_idle_w=21.0, part_number="900-5G133-2200-000",
    vbios="95.02.2C.00.01",
)  # fmt: skip
_GB10 = Model(
    name="NVIDIA GB10", device_id="2e12", pci_class="0300", arch="Blackwell", mem_bytes=128 << 30,
    sm_clock_max_mhz=3003, sm_clock_busy_mhz=2418, sm_clock_idle_mhz=208,
    mem_clock_max_mhz=8533, mem_clock_idle_mhz=8533,
    idle_pstate=8, pcie_gen=1, pcie_gen_idle=1,
    power_limit_w=140.0, power_busy_w=92.0, power_idle_w=4.5, power_capped=False,
    slowdown_c=95.0, warm_c=71.0, hbm=False, has_margin=False, has_serial=False,
    part_number="", vbios="9A.0B.12.00.00", ecc=False, own_memory=False,
)  # fmt: skip
_VGPU = Model(
    name="NVIDIA A40-48Q", device_id="2235", pci_class="0300", arch="Ampere", mem_bytes=49152 * _MIB,
    sm_clock_max_mhz=1740, sm_clock_busy_mhz=1695, sm_clock_idle_mhz=210,
    mem_clock_max_mhz=7251, mem_clock_idle_mhz=405,
    idle_pstate=8, pcie_gen=4, pcie_gen_idle=4,
    power_limit_w=300.0, power_busy_w=280.0, power_idle_w=30.0, power_capped=False,
    slowdown_c=90.0, warm_c=65.0, hbm=False, has_margin=False, has_serial=False,
    part_number="", vbios="00.00.00.00.00", ecc=False, guest=True,
)  # fmt: skip

SHORT: dict[str, Model] = {
    "H100": _H100, "H200": _H200, "A100": _A100, "RTX 4090": _RTX4090, "T4": _T4, "GH200": _GH200,
    "B200": _B200, "H100 NVL": _H100_NVL, "A100 PCIe": _A100_PCIE,
    "L40S": _L40S, "RTX 6000 Ada": _RTX6000, "GB10": _GB10, "vGPU": _VGPU,
}  # fmt: skip
"""Every model that can be simulated, by its short name."""

_MODELS = SHORT | {model.name: model for model in SHORT.values()}

H2D_SPREAD = 0.007
"""Spread of the host-to-device bench, as a part of its value."""

_SLOTS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
_GB_PER_S_X16 = {1: 3.1, 2: 6.3, 3: 12.6, 4: 25.6, 5: 52.9, 6: 104.0}


@dataclass(frozen=True, slots=True)
class Board:
    """One card as it was made: `number` counts the boards that sat in this slot, from 0."""

    uuid: str
    serial: str
    pci: str
    parent: str
    slot: int
    number: int
    key: int


def model(name: str) -> Model:
    """By its short name or the driver's.

    Raises:
        KeyError: Not simulated.
    """
    return _MODELS[name]


def number(*parts: int | str) -> int:
    """A 64-bit number from any words: the same in every process."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def uuid(*parts: int | str) -> str:
    """A version 4 UUID from any words: the same in every process."""
    text = "\0".join(map(str, parts)).encode()
    digits = hashlib.blake2b(text, digest_size=16).hexdigest()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


@lru_cache(maxsize=20_000)
def board(seed: int, node: str, slot: int, generation: int, model_: Model) -> Board:
    """The `generation`-th board in a slot of a host."""
    key = number(seed, node, slot, generation, "board")
    serial = f"165{key % 10**10:010d}" if model_.has_serial else ""
    pci = slot_address(slot)
    domain, bus, _ = pci.split(":")
    parent = f"{domain}:{int(bus, 16) - 1:02x}:01.0"
    return Board(
        f"GPU-{uuid(seed, node, slot, generation, 'gpu')}", serial, pci, parent, slot, generation, key
    )


def slot_address(slot: int) -> str:
    """PCI address of a slot."""
    domain, place = divmod(slot, len(_SLOTS))
    return f"{domain:04x}:{_SLOTS[place]}:00.0"


def busy_clock_mhz(model_: Model, board_: Board) -> float:
    """What this healthy board holds under a steady load: boards differ by a step or two of 15 MHz."""
    return float(model_.sm_clock_busy_mhz + 15 * (board_.key % 3 - 1))


def h2d_gb_per_s(model_: Model, board_: Board, gen: int, width: int) -> float:
    """Host-to-device copies over a link of this board, without noise."""
    own = 1 + 0.004 * ((board_.key >> 8) % 1001 / 500 - 1)
    return _GB_PER_S_X16[min(gen, model_.pcie_gen)] * width / 16 * own
