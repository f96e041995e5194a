"""The cards' memory errors, repairs, limits and modes: what changes rarely and says most. Table `gpu_health`.

Counts of ECC errors come twice: since the driver was loaded, and over the card's life (`_lifetime_`). Which
memories a card counts apart depends on its generation: dram and sram from Ampere on, the others before.
"""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Null, Reason, Row, Type, Unit
from gpufleet_agent.drivers import Host, Hung, Lost

EVERY = 60.0

_F, _I, _U, _S, _B = Type.F64, Type.I64, Type.U64, Type.STRING, Type.BOOL
_G, _C, _ST = Kind.GAUGE, Kind.COUNTER, Kind.STATE

METRICS = (
    Metric("gpu_uuid", _S, Unit.TEXT, Kind.KEY, "Identity of the card (nvidia-smi: uuid)."),
    Metric("gpu_index", _I, Unit.ONE, Kind.KEY, "The driver's number today; never an identity.", 0, 1023),
    Metric("pci", _S, Unit.TEXT, Kind.KEY, "PCI address dddd:bb:dd.f (nvidia-smi: pci.bus_id)."),
    Metric("state", _S, Unit.TEXT, _ST, "ok, lost (no longer answers) or hung (a call passed its deadline).", rollup="last"),
    Metric("recovery_action", _S, Unit.TEXT, _ST, "What the driver wants done: none, gpu_reset, node_reboot, drain_p2p, drain_and_reset, recover_imex, bus_reset, system_reboot (nvidia-smi -q: GPU Recovery Action).", rollup="last"),
    Metric("ecc_enabled", _B, Unit.ONE, _ST, "ECC is on (nvidia-smi: ecc.mode.current).", rollup="last"),
    Metric("ecc_pending", _B, Unit.ONE, _ST, "ECC will be on after the next reboot (nvidia-smi: ecc.mode.pending).", rollup="last"),
    Metric("ecc_corrected_total", _U, Unit.COUNT, _C, "Corrected errors of all memories since the driver was loaded (nvidia-smi: ecc.errors.corrected.volatile.total).", rollup="delta"),
    Metric("ecc_uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors of all memories since the driver was loaded (nvidia-smi: ecc.errors.uncorrected.volatile.total).", rollup="delta"),
    Metric("ecc_corrected_lifetime_total", _U, Unit.COUNT, _C, "Corrected errors over the card's life (nvidia-smi: ecc.errors.corrected.aggregate.total).", rollup="delta"),
    Metric("ecc_uncorrectable_lifetime_total", _U, Unit.COUNT, _C, "Uncorrectable errors over the card's life (nvidia-smi: ecc.errors.uncorrected.aggregate.total).", rollup="delta"),
    Metric("ecc_dram_corrected_total", _U, Unit.COUNT, _C, "Corrected errors of the device memory since the driver was loaded.", rollup="delta"),
    Metric("ecc_dram_uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the device memory since the driver was loaded.", rollup="delta"),
    Metric("ecc_dram_corrected_lifetime_total", _U, Unit.COUNT, _C, "Corrected errors of the device memory over the card's life.", rollup="delta"),
    Metric("ecc_dram_uncorrectable_lifetime_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the device memory over the card's life.", rollup="delta"),
    Metric("ecc_sram_corrected_total", _U, Unit.COUNT, _C, "Corrected errors of the on-chip memories since the driver was loaded; Ampere and newer.", rollup="delta"),
    Metric("ecc_sram_uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the on-chip memories since the driver was loaded, parity and SEC-DED.", rollup="delta"),
    Metric("ecc_sram_corrected_lifetime_total", _U, Unit.COUNT, _C, "Corrected errors of the on-chip memories over the card's life.", rollup="delta"),
    Metric("ecc_sram_uncorrectable_lifetime_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the on-chip memories over the card's life, parity and SEC-DED.", rollup="delta"),
    Metric("ecc_sram_threshold_exceeded", _B, Unit.ONE, _ST, "So many on-chip errors that NVIDIA replaces the card (nvidia-smi -q: SRAM Threshold Exceeded); needs root.", rollup="max"),
    Metric("ecc_l1_corrected_total", _U, Unit.COUNT, _C, "Corrected errors of the L1 caches since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_l1_uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the L1 caches since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_l1_corrected_lifetime_total", _U, Unit.COUNT, _C, "Corrected errors of the L1 caches over the card's life.", rollup="delta"),
    Metric("ecc_l1_uncorrectable_lifetime_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the L1 caches over the card's life.", rollup="delta"),
    Metric("ecc_l2_corrected_total", _U, Unit.COUNT, _C, "Corrected errors of the L2 cache since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_l2_uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the L2 cache since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_l2_corrected_lifetime_total", _U, Unit.COUNT, _C, "Corrected errors of the L2 cache over the card's life.", rollup="delta"),
    Metric("ecc_l2_uncorrectable_lifetime_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the L2 cache over the card's life.", rollup="delta"),
    Metric("ecc_register_corrected_total", _U, Unit.COUNT, _C, "Corrected errors of the register files since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_register_uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the register files since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_register_corrected_lifetime_total", _U, Unit.COUNT, _C, "Corrected errors of the register files over the card's life.", rollup="delta"),
    Metric("ecc_register_uncorrectable_lifetime_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the register files over the card's life.", rollup="delta"),
    Metric("ecc_texture_corrected_total", _U, Unit.COUNT, _C, "Corrected errors of texture and shared memory since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_texture_uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors of texture and shared memory since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_texture_corrected_lifetime_total", _U, Unit.COUNT, _C, "Corrected errors of texture and shared memory over the card's life.", rollup="delta"),
    Metric("ecc_texture_uncorrectable_lifetime_total", _U, Unit.COUNT, _C, "Uncorrectable errors of texture and shared memory over the card's life.", rollup="delta"),
    Metric("ecc_cbu_uncorrectable_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the branch units since the driver was loaded; before Ampere.", rollup="delta"),
    Metric("ecc_cbu_uncorrectable_lifetime_total", _U, Unit.COUNT, _C, "Uncorrectable errors of the branch units over the card's life.", rollup="delta"),
    Metric("remapped_rows_corrected_total", _U, Unit.COUNT, _C, "Memory rows replaced for corrected errors over the card's life (nvidia-smi: remapped_rows.correctable).", 0, 1e6, "delta"),
    Metric("remapped_rows_uncorrectable_total", _U, Unit.COUNT, _C, "Memory rows replaced for uncorrectable errors over the card's life (nvidia-smi: remapped_rows.uncorrectable).", 0, 1e6, "delta"),
    Metric("remapped_rows_corrected_inactive", _U, Unit.COUNT, _G, "Of the rows for corrected errors, those not in use.", 0, 1e6, "max"),
    Metric("remapped_rows_uncorrectable_inactive", _U, Unit.COUNT, _G, "Of the rows for uncorrectable errors, those not in use.", 0, 1e6, "max"),
    Metric("remap_pending", _B, Unit.ONE, _ST, "A row waits for a reset to be replaced (nvidia-smi: remapped_rows.pending).", rollup="max"),
    Metric("remap_failed", _B, Unit.ONE, _ST, "A row could not be replaced: the card goes back (nvidia-smi: remapped_rows.failure).", rollup="max"),
    Metric("remap_banks_max", _U, Unit.COUNT, _G, "Memory banks with all spare rows left (nvidia-smi -q: Bank Remap Availability Histogram).", 0, 1e6, "min"),
    Metric("remap_banks_high", _U, Unit.COUNT, _G, "Banks with most spare rows left.", 0, 1e6, "max"),
    Metric("remap_banks_partial", _U, Unit.COUNT, _G, "Banks with some spare rows left.", 0, 1e6, "max"),
    Metric("remap_banks_low", _U, Unit.COUNT, _G, "Banks with few spare rows left.", 0, 1e6, "max"),
    Metric("remap_banks_none", _U, Unit.COUNT, _G, "Banks without a spare row: the next error there fails.", 0, 1e6, "max"),
    Metric("retired_pages_corrected_total", _U, Unit.COUNT, _C, "Memory pages retired for corrected errors over the card's life; before Ampere (nvidia-smi: retired_pages.single_bit_ecc.count).", 0, 1e6, "delta"),
    Metric("retired_pages_uncorrectable_total", _U, Unit.COUNT, _C, "Memory pages retired for uncorrectable errors over the card's life; before Ampere (nvidia-smi: retired_pages.double_bit.count).", 0, 1e6, "delta"),
    Metric("retired_pages_pending", _B, Unit.ONE, _ST, "A page waits for the driver to be loaded anew (nvidia-smi: retired_pages.pending).", rollup="max"),
    Metric("channel_repair_pending", _B, Unit.ONE, _ST, "A memory channel waits for a reset to be repaired; newest cards.", rollup="max"),
    Metric("tpc_repair_pending", _B, Unit.ONE, _ST, "A processor cluster waits for a reset to be repaired; newest cards.", rollup="max"),
    Metric("memory_unrepairable", _B, Unit.ONE, _ST, "The memory has damage that no repair is left for; Hopper and newer.", rollup="max"),
    Metric("pcie_replay_total", _U, Unit.COUNT, _C, "PCIe packets sent again (nvidia-smi -q: Replays Since Reset).", rollup="delta"),
    Metric("pcie_replay_rollover_total", _U, Unit.COUNT, _C, "Times four replays in a row made the link train anew (nvidia-smi -q: Replay Number Rollovers).", rollup="delta"),
    Metric("pcie_recovery_total", _U, Unit.COUNT, _C, "Times the link went from L0 to recovery.", rollup="delta"),
    Metric("pcie_correctable_total", _U, Unit.COUNT, _C, "Correctable PCIe errors.", rollup="delta"),
    Metric("pcie_naks_received_total", _U, Unit.COUNT, _C, "PCIe packets that the other end refused.", rollup="delta"),
    Metric("pcie_naks_sent_total", _U, Unit.COUNT, _C, "PCIe packets that the card refused.", rollup="delta"),
    Metric("pcie_receiver_errors_total", _U, Unit.COUNT, _C, "PCIe receiver errors.", rollup="delta"),
    Metric("pcie_bad_tlp_total", _U, Unit.COUNT, _C, "Bad PCIe transaction packets.", rollup="delta"),
    Metric("pcie_bad_dllp_total", _U, Unit.COUNT, _C, "Bad PCIe link packets.", rollup="delta"),
    Metric("pcie_lcrc_total", _U, Unit.COUNT, _C, "PCIe packets with a wrong checksum.", rollup="delta"),
    Metric("pcie_nonfatal_total", _U, Unit.COUNT, _C, "Uncorrectable PCIe errors that the link survived.", rollup="delta"),
    Metric("pcie_fatal_total", _U, Unit.COUNT, _C, "Fatal PCIe errors.", rollup="delta"),
    Metric("pcie_unsupported_total", _U, Unit.COUNT, _C, "PCIe requests that the card does not support.", rollup="delta"),
    Metric("sm_clock_app_mhz", _F, Unit.MHZ, _ST, "SM clock that people set for applications; newest drivers no longer tell (nvidia-smi: clocks.applications.graphics).", 0, 5000, "last"),
    Metric("mem_clock_app_mhz", _F, Unit.MHZ, _ST, "Memory clock that people set for applications; newest drivers no longer tell (nvidia-smi: clocks.applications.memory).", 0, 20000, "last"),
    Metric("power_limit_requested_w", _F, Unit.WATT, _ST, "Limit that was set; the enforced one may be lower (nvidia-smi: power.limit).", 0, 3000, "last"),
    Metric("power_limit_default_w", _F, Unit.WATT, _ST, "Limit as delivered (nvidia-smi: power.default_limit).", 0, 3000, "last"),
    Metric("power_limit_min_w", _F, Unit.WATT, _ST, "Lowest limit that can be set (nvidia-smi: power.min_limit).", 0, 3000, "last"),
    Metric("power_limit_max_w", _F, Unit.WATT, _ST, "Highest limit that can be set (nvidia-smi: power.max_limit).", 0, 3000, "last"),
    Metric("slowdown_temperature_c", _F, Unit.CELSIUS, _ST, "GPU temperature at which hardware slows down; up to Ampere.", 0, 150, "last"),
    Metric("shutdown_temperature_c", _F, Unit.CELSIUS, _ST, "GPU temperature at which the card switches off; up to Ampere.", 0, 150, "last"),
    Metric("mem_max_temperature_c", _F, Unit.CELSIUS, _ST, "Memory temperature at which software slows down; up to Ampere.", 0, 150, "last"),
    Metric("slowdown_margin_c", _F, Unit.CELSIUS, _ST, "gpu.temperature_margin_c below which hardware slows down; Ada and newer (nvidia-smi -q: GPU Slowdown T.Limit Temp).", -150, 150, "last"),
    Metric("shutdown_margin_c", _F, Unit.CELSIUS, _ST, "gpu.temperature_margin_c below which the card switches off; Ada and newer.", -150, 150, "last"),
    Metric("gpu_max_margin_c", _F, Unit.CELSIUS, _ST, "gpu.temperature_margin_c below which software slows down; Ada and newer.", -150, 150, "last"),
    Metric("mem_max_margin_c", _F, Unit.CELSIUS, _ST, "The same for the memory; Ada and newer.", -150, 150, "last"),
    Metric("persistence_enabled", _B, Unit.ONE, _ST, "The driver stays loaded without clients (nvidia-smi: persistence_mode).", rollup="last"),
    Metric("mig_enabled", _B, Unit.ONE, _ST, "The card is split into instances (nvidia-smi: mig.mode.current).", rollup="last"),
    Metric("mig_pending", _B, Unit.ONE, _ST, "It will be after the next reset (nvidia-smi: mig.mode.pending).", rollup="last"),
    Metric("compute_mode", _S, Unit.TEXT, _ST, "default, exclusive_process or prohibited (nvidia-smi: compute_mode).", rollup="last"),
    Metric("fabric_state", _S, Unit.TEXT, _ST, "not_started, in_progress or completed; NULL without an NVLink fabric (nvidia-smi -q: Fabric State).", rollup="last"),
    Metric("fabric_status", _U, Unit.ONE, _ST, "How joining the fabric ended: 0 well, else NVIDIA's error code.", 0, 2**31, "last"),
    Metric("fabric_health", _S, Unit.TEXT, _ST, "healthy, unhealthy or limited (nvidia-smi -q: Fabric Health Summary).", rollup="last"),
    Metric("fabric_health_bits", _U, Unit.BITS, _ST, "What ails the fabric, NVIDIA's nvmlGpuFabricInfo healthMask.", 0, 2**32 - 1, "last"),
    Metric("processes", _U, Unit.COUNT, _G, "Entries in the driver's list of computing processes, odd ones too: above 0 the card is in use.", 0, 1e5, "max"),
    Metric("driver_version", _S, Unit.TEXT, _ST, "Of the loaded kernel module (/proc/driver/nvidia/version).", rollup="last"),
    Metric("library_version", _S, Unit.TEXT, _ST, "Of the library on disk, which a process started now would load; it should be driver_version.", rollup="last"),
    Metric("driver_epoch", _U, Unit.COUNT, _ST, "Counts the driver's initialisations; counts since the driver was loaded start anew with it.", 0, 2**31, "last"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row per card the driver knows.

    Raises:
        DriverGone: Cards are on the bus but no driver answers.
    """
    for gpu in host.gpus():
        row: dict[str, float | int | bool | str | Null] = {}
        try:
            row.update(gpu.read("gpu_health"))
            row["state"] = "ok"
        except (Lost, Hung) as trouble:
            row = {metric.name: Null(Reason.FAILED, trouble.code) for metric in METRICS}
            row["state"] = "lost" if isinstance(trouble, Lost) else "hung"
        row.update(
            gpu_uuid=gpu.uuid or Null(Reason.NOT_READ),
            gpu_index=gpu.index,
            pci=gpu.pci,
            driver_epoch=host.epoch,
        )
        yield row
