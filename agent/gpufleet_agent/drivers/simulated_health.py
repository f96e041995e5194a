"""Memory errors, repairs, limits and modes of a simulated card: its answer to probe `gpu_health`.

Pure: a row is a function of the model, what holds for the card, and the time.
"""

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import nvml_health
from gpufleet_agent.drivers.cards import Model
from gpufleet_agent.drivers.timeline import CardPhase, Errors

_ABSENT = Null(Reason.NOT_SUPPORTED, "NVML 3")
_LINK_ERRORS = tuple(
    name for name in nvml_health.COLUMNS if name.startswith("pcie_") and name.endswith("_total")
)
_SOUND_FABRIC = 0b01_01_0001_10_10_10_10
"""Nothing degraded, configured rightly, in a partition, its manager connected."""


def health(model: Model, phase: CardPhase, t: float, driver: str, library: str) -> dict[str, Cell]:
    """One row without the keys; what a card of this model does not have is NULL."""
    row: dict[str, Cell] = dict.fromkeys(nvml_health.COLUMNS, _ABSENT)
    row |= {
        "persistence_enabled": phase.persistence,
        "compute_mode": "default",
        "processes": int(bool(phase.util)),
        "driver_version": driver,
        "library_version": library,
    }
    if model.guest:
        return row
    errors = phase.errors(t)
    row |= _limits(model, phase) | {"recovery_action": phase.action}
    if model.ecc:
        row |= _ecc(errors, phase, on_chip=model.banks > 0)
    if model.own_memory:
        row |= dict.fromkeys(_LINK_ERRORS, 0) | {"pcie_replay_total": int(errors.replays)}
    if model.banks and not phase.mig:
        row |= _remapped(errors, phase, model.banks)
    if model.mig:
        row |= {"mig_enabled": phase.mig, "mig_pending": phase.mig}
    if model.fabric:
        row |= {"fabric_state": phase.fabric, "fabric_status": 0}
        if phase.fabric == "completed":
            row |= {"fabric_health": "healthy", "fabric_health_bits": _SOUND_FABRIC}
    return row


def _limits(model: Model, phase: CardPhase) -> dict[str, Cell]:
    limits: dict[str, Cell] = {
        "sm_clock_app_mhz": float(model.sm_clock_max_mhz) if model.has_serial else _ABSENT,
        "mem_clock_app_mhz": float(model.mem_clock_max_mhz) if model.has_serial else _ABSENT,
        "power_limit_requested_w": phase.limit_w,
        "power_limit_default_w": model.power_limit_w,
        "power_limit_min_w": float(round(model.power_limit_w / 3.5)),
        "power_limit_max_w": model.power_limit_w,
    }
    if model.has_margin:
        limits |= {"slowdown_margin_c": -2.0, "shutdown_margin_c": -8.0, "gpu_max_margin_c": 0.0}
        return limits | ({"mem_max_margin_c": 0.0} if model.hbm else {})
    slowdown: dict[str, Cell] = {"slowdown_temperature_c": model.slowdown_c}
    return limits | slowdown | {"shutdown_temperature_c": model.slowdown_c + 3}


def _ecc(errors: Errors, phase: CardPhase, on_chip: bool) -> dict[str, Cell]:
    """Counters. A card that MIG splits counts those since the driver was loaded per instance only."""
    row: dict[str, Cell] = {"ecc_enabled": True, "ecc_pending": True}
    for kind in ("corrected", "uncorrectable"):
        for life in ("", "life_"):
            counts = {
                where: int(getattr(errors, f"{life}{where}_{kind}"))
                for where in (("dram", "sram") if on_chip else ("dram",))
            }
            end = f"{kind}_{'lifetime_' if life else ''}total"
            split = phase.mig and not life
            row[f"ecc_{end}"] = _ABSENT if split else sum(counts.values())
            row |= {f"ecc_{where}_{end}": _ABSENT if split else count for where, count in counts.items()}
    if on_chip:
        row["ecc_sram_threshold_exceeded"] = phase.sram_threshold
    else:
        row |= {"retired_pages_corrected_total": 0, "retired_pages_uncorrectable_total": 0}
        row["retired_pages_pending"] = False
    return row


def _remapped(errors: Errors, phase: CardPhase, banks: int) -> dict[str, Cell]:
    """A bank that cannot replace a row has used up its eight spare ones."""
    used_up = int(phase.remap_failed)
    used = int(errors.remapped_uncorrectable > 0 and not used_up)
    return {
        "remapped_rows_corrected_total": 0,
        "remapped_rows_uncorrectable_total": int(errors.remapped_uncorrectable) + 8 * used_up,
        "remapped_rows_corrected_inactive": 0,
        "remapped_rows_uncorrectable_inactive": 0,
        "remap_pending": phase.remap_pending,
        "remap_failed": phase.remap_failed,
        "remap_banks_max": banks - used - used_up,
        "remap_banks_high": used,
        "remap_banks_partial": 0,
        "remap_banks_low": 0,
        "remap_banks_none": used_up,
    }
