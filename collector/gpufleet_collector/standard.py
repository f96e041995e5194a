"""Types of the columns that the standard probes have: what rules and views of the collector read.

Any other column has the type of the first agent that names it. If these had, one agent with another idea of
`util_pct` would have the columns of all others refused, and the rules would be blind for the whole fleet.
"""

from collections.abc import Mapping

from gpufleet.metric import Type


def _of(
    string: str = "", f64: str = "", i64: str = "", u64: str = "", boolean: str = ""
) -> Mapping[str, Type]:
    groups = {Type.STRING: string, Type.F64: f64, Type.I64: i64, Type.U64: u64, Type.BOOL: boolean}
    return {name: kind for kind, names in groups.items() for name in names.split()}


STANDARD: Mapping[str, Mapping[str, Type]] = {
    "gpu": _of(
        string="""
            gpu_uuid pci state
        """,
        f64="""
            util_pct util_pct_min util_pct_p10 sm_clock_mhz sm_clock_mhz_min sm_clock_mhz_p10 power_w
            power_w_min power_w_p10 power_limit_w mem_util_pct mem_clock_mhz temperature_c
            temperature_margin_c mem_temperature_c power_cap_s_total sync_boost_s_total
            sw_thermal_s_total hw_thermal_s_total hw_brake_s_total energy_j_total
        """,
        i64="""
            gpu_index
        """,
        u64="""
            mem_used_bytes mem_total_bytes pstate clock_reasons pcie_gen pcie_gen_max pcie_width
            pcie_width_max driver_epoch
        """,
    ),
    "gpu_health": _of(
        string="""
            gpu_uuid pci state recovery_action compute_mode fabric_state fabric_health driver_version
            library_version
        """,
        f64="""
            power_limit_requested_w power_limit_default_w power_limit_min_w power_limit_max_w
            slowdown_temperature_c shutdown_temperature_c mem_max_temperature_c slowdown_margin_c
            shutdown_margin_c gpu_max_margin_c mem_max_margin_c
        """,
        i64="""
            gpu_index
        """,
        u64="""
            ecc_corrected_total ecc_uncorrectable_total ecc_corrected_lifetime_total
            ecc_uncorrectable_lifetime_total ecc_dram_corrected_total ecc_dram_uncorrectable_total
            ecc_dram_corrected_lifetime_total ecc_dram_uncorrectable_lifetime_total
            ecc_sram_corrected_total ecc_sram_uncorrectable_total ecc_sram_corrected_lifetime_total
            ecc_sram_uncorrectable_lifetime_total ecc_l1_corrected_total ecc_l1_uncorrectable_total
            ecc_l1_corrected_lifetime_total ecc_l1_uncorrectable_lifetime_total ecc_l2_corrected_total
            ecc_l2_uncorrectable_total ecc_l2_corrected_lifetime_total
            ecc_l2_uncorrectable_lifetime_total ecc_register_corrected_total
            ecc_register_uncorrectable_total ecc_register_corrected_lifetime_total
            ecc_register_uncorrectable_lifetime_total ecc_texture_corrected_total
            ecc_texture_uncorrectable_total ecc_texture_corrected_lifetime_total
            ecc_texture_uncorrectable_lifetime_total ecc_cbu_uncorrectable_total
            ecc_cbu_uncorrectable_lifetime_total remapped_rows_corrected_total
            remapped_rows_uncorrectable_total remapped_rows_corrected_inactive
            remapped_rows_uncorrectable_inactive remap_banks_max remap_banks_high remap_banks_partial
            remap_banks_low remap_banks_none retired_pages_corrected_total
            retired_pages_uncorrectable_total pcie_replay_total pcie_replay_rollover_total
            pcie_recovery_total pcie_correctable_total pcie_naks_received_total pcie_naks_sent_total
            pcie_receiver_errors_total pcie_bad_tlp_total pcie_bad_dllp_total pcie_lcrc_total
            pcie_nonfatal_total pcie_fatal_total pcie_unsupported_total fabric_status fabric_health_bits
            processes driver_epoch
        """,
        boolean="""
            ecc_enabled ecc_pending ecc_sram_threshold_exceeded remap_pending remap_failed
            retired_pages_pending channel_repair_pending tpc_repair_pending memory_unrepairable
            persistence_enabled mig_enabled mig_pending
        """,
    ),
    "pci": _of(
        string="""
            pci device_kind vendor_id device_id bound_driver gpu_uuid parent runtime_status
        """,
        i64="""
            numa_node
        """,
        u64="""
            pcie_gen pcie_gen_max pcie_width pcie_width_max
        """,
        boolean="""
            present excluded
        """,
    ),
    "host": _of(
        f64="""
            cpu_busy_s_total cpu_iowait_s_total cpu_steal_s_total load1 load15 psi_cpu_some_s_total
            psi_memory_full_s_total psi_io_some_s_total psi_io_full_s_total uptime_s
        """,
        u64="""
            cpus processes processes_blocked context_switches_total mem_total_bytes mem_available_bytes
            swap_used_bytes
        """,
    ),
    "job": _of(
        string="""
            gpu_uuid pci job_kind job_id job_step container user command
        """,
        f64="""
            psi_io_some_s_total psi_io_full_s_total psi_cpu_some_s_total psi_memory_full_s_total
        """,
        i64="""
            gpu_index
        """,
        u64="""
            pid pid_start uid rank local_rank world mem_used_bytes
        """,
    ),
    "loader": _of(
        string="""
            source loader state role lib wait_hist
        """,
        f64="""
            wait_s_total busy_s_total startup_s_total pause_s_total wait_max_s worker_cpu_s_total
            worker_runqueue_s_total
        """,
        u64="""
            pid pid_start uid rank local_rank world fetches_total starved_total ready prefetch workers
            workers_running workers_disk workers_sleeping worker_read_bytes_total worker_read_chars_total
            messages_lost_total
        """,
    ),
    "agent": _of(
        string="""
            probe error
        """,
        f64="""
            seconds cpu_s_total spool_oldest_s
        """,
        u64="""
            rows pss_bytes sampler_restarts_total spool_batches spool_bytes spool_dropped_total
            reconnects_total
        """,
        boolean="""
            ok
        """,
    ),
    "bench": _of(
        string="""
            entity peer bench version convention params_hash unit status reason lease driver link
        """,
        f64="""
            value spread seconds gpu_seconds temperature_c power_w sm_clock_mhz
        """,
        u64="""
            repeats clock_reasons
        """,
    ),
}
"""Probe -> column -> type. Columns that are not here take the type of the first agent that has them."""
