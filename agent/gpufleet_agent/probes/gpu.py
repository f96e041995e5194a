"""The cards: clocks, load, power, temperature, throttling, PCIe link. Table `gpu`.

A card that stops answering stays in the table as a row with `state` and NULLs, so that seven good cards and one
lost one are eight rows.
"""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Null, Reason, Row, Type, Unit
from gpufleet_agent.drivers import Host, Hung, Lost

EVERY = 5.0
TICK = 1.0

_F, _I, _U, _S = Type.F64, Type.I64, Type.U64, Type.STRING
_G, _C, _ST = Kind.GAUGE, Kind.COUNTER, Kind.STATE

METRICS = (
    Metric("gpu_uuid", _S, Unit.TEXT, Kind.KEY, "Identity of the card (nvidia-smi: uuid)."),
    Metric("gpu_index", _I, Unit.ONE, Kind.KEY, "The driver's number today; never an identity.", 0, 1023),
    Metric("pci", _S, Unit.TEXT, Kind.KEY, "PCI address dddd:bb:dd.f (nvidia-smi: pci.bus_id)."),
    Metric("state", _S, Unit.TEXT, _ST, "ok, lost (no longer answers) or hung (a call passed its deadline).", rollup="last"),
    Metric("util_pct", _F, Unit.PERCENT, _G, "Time with a kernel running, mean of 1 Hz (nvidia-smi: utilization.gpu).", 0, 100, "mean"),
    Metric("util_pct_min", _F, Unit.PERCENT, _G, "Smallest 1 Hz value since the last row.", 0, 100, "min"),
    Metric("util_pct_p10", _F, Unit.PERCENT, _G, "Tenth percentile of the 1 Hz values.", 0, 100, "min"),
    Metric("sm_clock_mhz", _F, Unit.MHZ, _G, "SM clock, mean of 1 Hz (nvidia-smi: clocks.sm).", 0, 5000, "mean"),
    Metric("sm_clock_mhz_min", _F, Unit.MHZ, _G, "Smallest 1 Hz value since the last row.", 0, 5000, "min"),
    Metric("sm_clock_mhz_p10", _F, Unit.MHZ, _G, "Tenth percentile of the 1 Hz values.", 0, 5000, "min"),
    Metric("power_w", _F, Unit.WATT, _G, "Board power, mean of 1 Hz (nvidia-smi: power.draw).", 0, 3000, "mean"),
    Metric("power_w_min", _F, Unit.WATT, _G, "Smallest 1 Hz value since the last row.", 0, 3000, "min"),
    Metric("power_w_p10", _F, Unit.WATT, _G, "Tenth percentile of the 1 Hz values.", 0, 3000, "min"),
    Metric("power_limit_w", _F, Unit.WATT, _G, "Enforced power limit (nvidia-smi: enforced.power.limit).", 0, 3000, "last"),
    Metric("mem_util_pct", _F, Unit.PERCENT, _G, "Time the memory was read or written (nvidia-smi: utilization.memory).", 0, 100, "mean"),
    Metric("mem_clock_mhz", _F, Unit.MHZ, _G, "Memory clock (nvidia-smi: clocks.mem).", 0, 20000, "mean"),
    Metric("mem_used_bytes", _U, Unit.BYTE, _G, "Memory in use (nvidia-smi: memory.used).", 0, 2**45, "max"),
    Metric("mem_total_bytes", _U, Unit.BYTE, _G, "Memory of the card (nvidia-smi: memory.total).", 0, 2**45, "last"),
    Metric("temperature_c", _F, Unit.CELSIUS, _G, "GPU temperature (nvidia-smi: temperature.gpu).", -40, 150, "max"),
    Metric("temperature_margin_c", _F, Unit.CELSIUS, _G, "Distance to the slowdown temperature, signed; Ada and newer.", -150, 150, "min"),
    Metric("mem_temperature_c", _F, Unit.CELSIUS, _G, "HBM temperature (nvidia-smi: temperature.memory).", 1, 125, "max"),
    Metric("pstate", _U, Unit.ONE, _ST, "Performance state, 0 fastest (nvidia-smi: pstate).", 0, 15, "last"),
    Metric("clock_reasons", _U, Unit.BITS, _ST, "Why the clock is not higher: 1 idle, 4 software power cap, 8 hardware slowdown, 32 software thermal, 64 hardware thermal, 128 power brake (nvidia-smi: clocks_event_reasons.active).", 0, 2**32 - 1, "last"),
    Metric("power_cap_s_total", _F, Unit.SECOND, _C, "Time slowed by the software power cap, since the driver was loaded.", 0, 1e12, "delta"),
    Metric("sync_boost_s_total", _F, Unit.SECOND, _C, "Time slowed to the pace of another card of its group, since the driver was loaded.", 0, 1e12, "delta"),
    Metric("sw_thermal_s_total", _F, Unit.SECOND, _C, "Time slowed by software for heat, since the driver was loaded.", 0, 1e12, "delta"),
    Metric("hw_thermal_s_total", _F, Unit.SECOND, _C, "Time slowed by hardware for heat, since the driver was loaded.", 0, 1e12, "delta"),
    Metric("hw_brake_s_total", _F, Unit.SECOND, _C, "Time slowed by the external power brake, since the driver was loaded.", 0, 1e12, "delta"),
    Metric("energy_j_total", _F, Unit.JOULE, _C, "Energy since the driver was loaded (nvidia-smi: total_energy_consumption).", 0, 1e15, "delta"),
    Metric("pcie_gen", _U, Unit.ONE, _ST, "PCIe generation now; idle cards drop to 1 (nvidia-smi: pcie.link.gen.gpucurrent).", 1, 8, "min"),
    Metric("pcie_gen_max", _U, Unit.ONE, _ST, "PCIe generation that card and slot can do (nvidia-smi: pcie.link.gen.max).", 1, 8, "last"),
    Metric("pcie_width", _U, Unit.ONE, _ST, "PCIe lanes now (nvidia-smi: pcie.link.width.current).", 1, 32, "min"),
    Metric("pcie_width_max", _U, Unit.ONE, _ST, "PCIe lanes that card and slot can do (nvidia-smi: pcie.link.width.max).", 1, 32, "last"),
    Metric("pcie_tx_bytes_total", _U, Unit.BYTE, _C, "Bytes that the card sent over PCIe; newer cards and drivers, and it may wrap.", rollup="delta"),
    Metric("pcie_rx_bytes_total", _U, Unit.BYTE, _C, "Bytes that the card received over PCIe; newer cards and drivers, and it may wrap.", rollup="delta"),
    Metric("sm_active_pct", _F, Unit.PERCENT, _G, "Processors of the card that had work, mean since the last row; Hopper and newer (dcgmi dmon: SMACT).", 0, 100, "mean"),
    Metric("sm_occupancy_pct", _F, Unit.PERCENT, _G, "How full of threads the processors were, mean since the last row; Hopper and newer (dcgmi dmon: SMOCC).", 0, 100, "mean"),
    Metric("tensor_active_pct", _F, Unit.PERCENT, _G, "Time the tensor cores worked, mean since the last row; Hopper and newer (dcgmi dmon: TENSO).", 0, 100, "mean"),
    Metric("mem_active_pct", _F, Unit.PERCENT, _G, "Memory bandwidth in use, mean since the last row; Hopper and newer (dcgmi dmon: DRAMA).", 0, 100, "mean"),
    Metric("fan_pct", _F, Unit.PERCENT, _G, "Fan speed that is asked for; NULL on cards that the host cools (nvidia-smi: fan.speed).", 0, 200, "max"),
    Metric("driver_epoch", _U, Unit.COUNT, _ST, "Counts the driver's initialisations; cumulative counters start anew with it.", 0, 2**31, "last"),
)  # fmt: skip


def tick(host: Host, /) -> None:
    """Put one 1 Hz value per card into its ring; a card in trouble simply adds none."""
    for gpu in host.gpus():
        try:
            gpu.ring.add(gpu.read("ring"))
        except (Lost, Hung):
            continue


def read(host: Host, /) -> Iterable[Row]:
    """One row per card the driver knows.

    Raises:
        DriverGone: Cards are on the bus but no driver answers.
    """
    for gpu in host.gpus():
        row: dict[str, float | int | bool | str | Null] = {}
        try:
            row.update(gpu.read("gpu"))
            row.update(gpu.ring.drain())
            row["state"] = "ok"
        except (Lost, Hung) as trouble:
            state = "lost" if isinstance(trouble, Lost) else "hung"
            row = {metric.name: Null(Reason.FAILED, trouble.code) for metric in METRICS}
            row["state"] = state
        row.update(
            gpu_uuid=gpu.uuid or Null(Reason.NOT_READ),
            gpu_index=gpu.index,
            pci=gpu.pci,
            driver_epoch=host.epoch,
        )
        yield row
