"""Memory errors, repairs, limits and modes of one card: what probe `gpu_health` shows.

Most of it is one batch call; what the batch does not have on this card or driver is asked by its own
function, and what neither has is remembered by `Card`, so that a sweep of a known card costs about ten calls.
"""

from collections.abc import Callable, Mapping

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.nvml_card import Card
from gpufleet_agent.drivers.nvml_values import (
    FabricV2,
    FabricV3,
    Field,
    SramStatus,
    flag,
    number,
    part,
    place,
    signed,
    watts,
    word,
)

_ABSENT = Null(Reason.NOT_SUPPORTED)
_AMPERE, _ADA = 7, 8
_DRAM, _SRAM = 2, 7
_GRAPHICS, _MEMORY = 0, 2
_COUNTS = {
    "corrected_total": (0, 0),
    "uncorrectable_total": (1, 0),
    "corrected_lifetime_total": (0, 1),
    "uncorrectable_lifetime_total": (1, 1),
}
"""Column ending -> the library's kind of error and kind of counter."""

_ACTIONS = {
    0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "recover_imex",
    6: "bus_reset", 7: "system_reboot",
}  # fmt: skip
_COMPUTE = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_FABRIC = {1: "not_started", 2: "in_progress", 3: "completed"}
_FABRIC_HEALTH = {1: "healthy", 2: "unhealthy", 3: "limited"}


def _action(value: object) -> Cell:
    return word(value, _ACTIONS)


def _places(name: str, corrected: int, uncorrectable: int, *lifetime: int) -> tuple[Field, ...]:
    ids = (corrected, uncorrectable, *lifetime)
    return tuple(Field(one, f"ecc_{name}_{end}") for one, end in zip(ids, _COUNTS, strict=True))


_FIELDS = (
    Field(1, "ecc_enabled", flag),
    Field(2, "ecc_pending", flag),
    Field(3, "ecc_corrected_total"),
    Field(4, "ecc_uncorrectable_total"),
    Field(5, "ecc_corrected_lifetime_total"),
    Field(6, "ecc_uncorrectable_lifetime_total"),
    *_places("l1", 7, 8, 18, 19),
    *_places("l2", 9, 10, 20, 21),
    *_places("dram", 11, 12, 22, 23),
    *_places("register", 13, 14, 24, 25),
    *_places("texture", 15, 16, 26, 27),
    Field(17, "ecc_cbu_uncorrectable_total"),
    Field(28, "ecc_cbu_uncorrectable_lifetime_total"),
    Field(29, "retired_pages_corrected_total"),
    Field(30, "retired_pages_uncorrectable_total"),
    Field(31, "retired_pages_pending", flag),
    Field(94, "pcie_replay_total"),
    Field(95, "pcie_replay_rollover_total"),
    Field(142, "remapped_rows_corrected_total"),
    Field(143, "remapped_rows_uncorrectable_total"),
    Field(144, "remap_pending", flag),
    Field(145, "remap_failed", flag),
    Field(301, "remapped_rows_corrected_inactive"),
    Field(302, "remapped_rows_uncorrectable_inactive"),
    Field(169, "pcie_recovery_total"),
    Field(173, "pcie_correctable_total"),
    Field(174, "pcie_naks_received_total"),
    Field(175, "pcie_receiver_errors_total"),
    Field(176, "pcie_bad_tlp_total"),
    Field(177, "pcie_naks_sent_total"),
    Field(178, "pcie_bad_dllp_total"),
    Field(179, "pcie_nonfatal_total"),
    Field(180, "pcie_fatal_total"),
    Field(181, "pcie_unsupported_total"),
    Field(182, "pcie_lcrc_total"),
    Field(187, "power_limit_min_w", watts),
    Field(188, "power_limit_max_w", watts),
    Field(189, "power_limit_default_w", watts),
    Field(192, "power_limit_requested_w", watts),
    Field(193, "shutdown_margin_c", signed),
    Field(194, "slowdown_margin_c", signed),
    Field(195, "mem_max_margin_c", signed),
    Field(196, "gpu_max_margin_c", signed),
    Field(230, "recovery_action", _action),
)
_OLD_ACTIONS = (Field(226, "gpu_reset", flag), Field(227, "drain_and_reset", flag))
"""What drivers before field 230 say instead."""

_OFFSETS = ("shutdown_margin_c", "slowdown_margin_c", "mem_max_margin_c", "gpu_max_margin_c")
_THRESHOLDS = ("shutdown_temperature_c", "slowdown_temperature_c", "mem_max_temperature_c")
_BANKS = {name: f"remap_banks_{name}" for name in ("max", "high", "partial", "low", "none")}
_RETIRED = ("retired_pages_corrected_total", "retired_pages_uncorrectable_total")
_REPAIRS = ("channel_repair_pending", "tpc_repair_pending")
_REST = (
    "sm_clock_app_mhz", "mem_clock_app_mhz", "memory_unrepairable",
    "persistence_enabled", "mig_enabled", "mig_pending", "compute_mode", "processes",
    "fabric_state", "fabric_status", "fabric_health", "fabric_health_bits",
)  # fmt: skip

COLUMNS = (
    *(field.name for field in _FIELDS),
    *(f"ecc_sram_{end}" for end in _COUNTS),
    "ecc_sram_threshold_exceeded",
    *_THRESHOLDS,
    *_BANKS.values(),
    *_REPAIRS,
    *_REST,
)
"""Every column that is read here."""


def read_health(card: Card, architecture: int) -> dict[str, Cell]:
    """One row without the keys; `architecture` is the library's number, 0 when it does not say.

    Raises:
        Lost: The card does not answer any more.
        DriverGone: No card does.
    """
    row = card.fields(_FIELDS)
    _fill(row, "ecc_enabled", lambda: flag(place(card.ask("nvmlDeviceGetEccMode"), 0)))
    _fill(row, "ecc_pending", lambda: flag(place(card.ask("nvmlDeviceGetEccMode"), 1)))
    row |= _errors(card, row)
    row |= _repairs(card, row)
    row |= _limits(card, row)
    row["sm_clock_app_mhz"] = number(card.ask("nvmlDeviceGetApplicationsClock", _GRAPHICS))
    row["mem_clock_app_mhz"] = number(card.ask("nvmlDeviceGetApplicationsClock", _MEMORY))
    row |= _thresholds(card, architecture)
    row["recovery_action"] = _recovery(card, row["recovery_action"])
    _fill(row, "pcie_replay_total", lambda: number(card.ask("nvmlDeviceGetPcieReplayCounter")))
    return row | _modes(card) | _fabric(card)


def mig(card: Card) -> tuple[Cell, Cell]:
    """Whether the card is split now, and after the next reset."""
    modes = card.ask("nvmlDeviceGetMigMode")
    return flag(place(modes, 0)), flag(place(modes, 1))


def listed(card: Card) -> object:
    """The driver's list of computing processes, or a Null."""
    return card.either("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


def tenants(card: Card) -> dict[str, Cell]:
    """`pids` of all processes that hold the card, whatever for, with spaces between; and `compute_mode`.

    Empty text = nobody; a Null = that cannot be said.
    """
    pids: list[str] = []
    trouble: Null | None = None
    for kind in ("Compute", "Graphics", "MPSCompute"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        found = card.either(f"{name}_v3", f"{name}_v2")
        if isinstance(found, list):
            pids += [str(number(getattr(entry, "pid", None))) for entry in found]
        elif isinstance(found, Null) and (kind == "Compute" or found.reason is not Reason.NOT_SUPPORTED):
            trouble = trouble or found
    # an entry whose process has no number is a tenant all the same
    text = " ".join(pid if pid.isdecimal() else "0" for pid in pids)
    said: Cell = text if text or trouble is None else trouble
    return {"pids": said, "compute_mode": word(card.ask("nvmlDeviceGetComputeMode"), _COMPUTE)}


def _fill(row: dict[str, Cell], name: str, ask: Callable[[], Cell]) -> None:
    """Ask otherwise for what is still not known to be there."""
    if _lacks(row[name]):
        row[name] = ask()


def _lacks(cell: Cell) -> bool:
    return isinstance(cell, Null) and cell.reason in (Reason.NOT_SUPPORTED, Reason.NOT_READ)


def _errors(card: Card, row: Mapping[str, Cell]) -> dict[str, Cell]:
    """ECC in total, of the device memory, and of the on-chip memories."""
    found: dict[str, Cell] = {}
    for end, kinds in _COUNTS.items():
        if _lacks(row[f"ecc_{end}"]):
            found[f"ecc_{end}"] = number(card.ask("nvmlDeviceGetTotalEccErrors", *kinds))
        if _lacks(row[f"ecc_dram_{end}"]):
            found[f"ecc_dram_{end}"] = number(card.ask("nvmlDeviceGetMemoryErrorCounter", *kinds, _DRAM))
    return found | _on_chip(card)


def _on_chip(card: Card) -> dict[str, Cell]:
    status = card.filled("nvmlDeviceGetSramEccErrorStatus", SramStatus())
    found: dict[str, Cell] = {"ecc_sram_threshold_exceeded": flag(part(status, "bThresholdExceeded"))}
    if isinstance(status, Null):  # it is for root alone; plain counters are for everybody
        for end, kinds in _COUNTS.items():
            found[f"ecc_sram_{end}"] = number(card.ask("nvmlDeviceGetMemoryErrorCounter", *kinds, _SRAM))
        return found
    return found | {
        "ecc_sram_corrected_total": number(part(status, "volatileCor")),
        "ecc_sram_uncorrectable_total": _sum(status, "volatileUncParity", "volatileUncSecDed"),
        "ecc_sram_corrected_lifetime_total": number(part(status, "aggregateCor")),
        "ecc_sram_uncorrectable_lifetime_total": _sum(status, "aggregateUncParity", "aggregateUncSecDed"),
    }


def _sum(struct: object, *names: str) -> Cell:
    """Of several counters; none when one of them is none."""
    total = 0
    for name in names:
        found = number(part(struct, name))
        if not isinstance(found, int):
            return found if isinstance(found, Null) else Null(Reason.FAILED, "float")
        total += found
    return total


def _repairs(card: Card, row: Mapping[str, Cell]) -> dict[str, Cell]:
    """Remapped rows, retired pages, and what is newer than both."""
    found: dict[str, Cell] = {}
    if _lacks(row["remap_failed"]):
        rows = card.ask("nvmlDeviceGetRemappedRows")
        found["remapped_rows_corrected_total"] = number(place(rows, 0))
        found["remapped_rows_uncorrectable_total"] = number(place(rows, 1))
        found["remap_pending"] = flag(place(rows, 2))
        found["remap_failed"] = flag(place(rows, 3))
    histogram = card.ask("nvmlDeviceGetRowRemapperHistogram")
    for member, column in _BANKS.items():
        found[column] = number(part(histogram, member))
    if _lacks(row["retired_pages_pending"]):
        found["retired_pages_pending"] = flag(card.ask("nvmlDeviceGetRetiredPagesPendingStatus"))
        for cause, column in enumerate(_RETIRED):
            pages = card.either("nvmlDeviceGetRetiredPages_v2", "nvmlDeviceGetRetiredPages", cause)
            found[column] = len(pages) if isinstance(pages, list) else number(pages)
    repair = card.ask("nvmlDeviceGetRepairStatus")
    for at, column in enumerate(_REPAIRS):
        found[column] = flag(place(repair, at))
    found["memory_unrepairable"] = flag(card.ask("nvmlDeviceGetUnrepairableMemoryFlag_v1"))
    return found


def _limits(card: Card, row: Mapping[str, Cell]) -> dict[str, Cell]:
    found: dict[str, Cell] = {}
    if _lacks(row["power_limit_min_w"]):
        between = card.ask("nvmlDeviceGetPowerManagementLimitConstraints")
        found["power_limit_min_w"] = watts(place(between, 0))
        found["power_limit_max_w"] = watts(place(between, 1))
    if _lacks(row["power_limit_default_w"]):
        found["power_limit_default_w"] = watts(card.ask("nvmlDeviceGetPowerManagementDefaultLimit"))
    if _lacks(row["power_limit_requested_w"]):
        found["power_limit_requested_w"] = watts(card.ask("nvmlDeviceGetPowerManagementLimit"))
    return found


def _thresholds(card: Card, architecture: int) -> dict[str, Cell]:
    """In degrees up to Ampere; as distances from Ada on, where degrees are on their way out."""
    found: dict[str, Cell] = {}
    if 0 < architecture <= _AMPERE:
        # such a card has no distances, also when a driver answers with zeroes
        found |= dict.fromkeys(_OFFSETS, _ABSENT)
    for at, column in enumerate(_THRESHOLDS):
        absent = architecture >= _ADA
        found[column] = _ABSENT if absent else number(card.ask("nvmlDeviceGetTemperatureThreshold", at))
    return found


def _recovery(card: Card, said: Cell) -> Cell:
    if not (isinstance(said, Null) and said.reason is Reason.NOT_SUPPORTED):
        return said
    older = card.fields(_OLD_ACTIONS)
    if all(isinstance(cell, Null) for cell in older.values()):
        return said
    return next((action for action in ("drain_and_reset", "gpu_reset") if older[action] is True), "none")


def _modes(card: Card) -> dict[str, Cell]:
    now, pending = mig(card)
    processes = listed(card)
    return {
        "persistence_enabled": flag(card.ask("nvmlDeviceGetPersistenceMode")),
        "mig_enabled": now,
        "mig_pending": pending,
        "compute_mode": word(card.ask("nvmlDeviceGetComputeMode"), _COMPUTE),
        "processes": len(processes) if isinstance(processes, list) else number(processes),
    }


def _fabric(card: Card) -> dict[str, Cell]:
    info = card.filled("nvmlDeviceGetGpuFabricInfoV", FabricV3())
    summed = not isinstance(info, Null)
    if isinstance(info, Null) and info.reason is Reason.NOT_SUPPORTED:
        info = card.filled("nvmlDeviceGetGpuFabricInfoV", FabricV2())
    state = number(part(info, "state"))
    if state == 0:
        state = _ABSENT
    if isinstance(state, Null):  # the rest means nothing then
        return dict.fromkeys(("fabric_state", "fabric_status", "fabric_health", "fabric_health_bits"), state)
    health = number(part(info, "healthSummary")) if summed else _ABSENT
    return {
        "fabric_state": word(state, _FABRIC),
        "fabric_status": number(part(info, "status")),
        "fabric_health": _ABSENT if health == 0 else word(health, _FABRIC_HEALTH),
        "fabric_health_bits": number(part(info, "healthMask")),
    }
