"""The NVLinks of a simulated card: its answer to probe `nvlink`.

Pure: a row is a function of the model, what holds for the card, its faults, its driver's start, and the time.
"""

from collections.abc import Sequence

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers.cards import Model
from gpufleet_agent.drivers.timeline import CardPhase
from gpufleet_agent.scenario import Fault

_ABSENT = Null(Reason.NOT_SUPPORTED, "NVML 3")
_SWITCHES = ("0000:07:00.0", "0000:08:00.0", "0000:09:00.0", "0000:0a:00.0")
_RATE_GB_PER_S = {"3.0": 25.781, "4.0": 26.562, "5.0": 53.125}
_TO_HOPPER = ("crc_errors_total", "replays_total", "recoveries_total", "ecc_errors_total")
_COUNTERS = {
    "3.0": _TO_HOPPER,
    "4.0": _TO_HOPPER,
    "5.0": (
        "recoveries_total", "recoveries_failed_total", "effective_errors_total", "rx_errors_total",
        "malformed_total", "overruns_total", "discards_total",
    ),
}  # fmt: skip
_SHOWS_IN = {"crc": "crc_errors_total", "replay": "replays_total", "recovery": "recoveries_total"}
_IN_USE = 0.12


def links(
    model: Model, phase: CardPhase, faults: Sequence[Fault], loaded_at: float, peer: str, t: float
) -> list[dict[str, Cell]]:
    """One row per link.

    Args:
        model: Of the card.
        phase: What holds for it.
        faults: All of the card, past ones too.
        loaded_at: When its driver was loaded; counters begin there.
        peer: Address of the card at the other end of a bridge.
        t: Now.
    """
    up = frozenset[int]() if phase.mig else _up(model, faults, loaded_at, t)
    rate = _RATE_GB_PER_S.get(model.nvlink, 0.0)
    worked_s = phase.totals(t).energy_j / model.power_busy_w
    rows: list[dict[str, Cell]] = []
    for link in range(model.nvlinks):
        bytes_ = int(_IN_USE * rate * 1e9 * worked_s) if link < model.nvlinks_wired else 0
        row: dict[str, Cell] = {
            "link": link,
            "link_state": "active" if link in up else "inactive",
            "version": model.nvlink,
            "speed_gb_per_s": rate if link in up else _ABSENT,
            "remote_kind": model.nvlink_to if link in up else _ABSENT,
            "remote_pci": _ABSENT,
            "tx_bytes_total": bytes_,
            "rx_bytes_total": bytes_,
        }
        if link in up:
            row["remote_pci"] = _SWITCHES[link % 4] if model.nvlink_to == "switch" else peer
        counts = _counted(model, faults, link, loaded_at, t)
        rows.append(row | counts | ({"effective_ber": 0.0} if model.nvlink == "5.0" else {}))
    return rows


def _counted(model: Model, faults: Sequence[Fault], link: int, loaded_at: float, t: float) -> dict[str, int]:
    counts = dict.fromkeys(_COUNTERS[model.nvlink], 0)
    for fault in faults:
        if fault.kind == "nvlink_errors" and fault.number("link") == link:
            lasted = max(0.0, min(t, fault.end) - max(fault.at, loaded_at))
            shown = _SHOWS_IN[str(fault.param("what"))]
            # generations that count neither checksums nor replays train a link anew at once
            counts[shown if shown in counts else "recoveries_total"] += int(
                fault.number("per_minute") / 60 * lasted
            )
    return counts


def _up(model: Model, faults: Sequence[Fault], loaded_at: float, t: float) -> frozenset[int]:
    """Which links are up: those that lead somewhere, but for what the faults take down."""
    up = set(range(model.nvlinks_wired))
    for fault in faults:
        if fault.kind == "nvlink_down" and fault.active(t):
            first = int(fault.number("link"))
            up -= set(range(first, first + int(fault.number("count"))))
        elif fault.kind == "nvlink_training" and fault.active(t):
            trained = (t - max(fault.at, loaded_at)) / fault.number("seconds")
            up &= set(range(int(trained * model.nvlinks_wired)))
    return frozenset(up)
