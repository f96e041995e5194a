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
            sm_active_pct sm_occupancy_pct tensor_active_pct mem_active_pct fan_pct
        """,
        i64="""
            gpu_index
        """,
        u64="""
            mem_used_bytes mem_total_bytes pstate clock_reasons pcie_gen pcie_gen_max pcie_width
            pcie_width_max pcie_tx_bytes_total pcie_rx_bytes_total driver_epoch
        """,
    ),
    "gpu_health": _of(
        string="""
            gpu_uuid pci state recovery_action compute_mode fabric_state fabric_health driver_version
            library_version
        """,
        f64="""
            sm_clock_app_mhz mem_clock_app_mhz power_limit_requested_w power_limit_default_w
            power_limit_min_w power_limit_max_w
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
    "nvlink": _of(
        string="""
            gpu_uuid pci state link_state version remote_kind remote_pci
        """,
        f64="""
            speed_gb_per_s effective_ber
        """,
        i64="""
            gpu_index link
        """,
        u64="""
            links links_active links_up links_most crc_errors_total replays_total recoveries_total
            recoveries_failed_total ecc_errors_total effective_errors_total rx_errors_total malformed_total
            overruns_total discards_total tx_bytes_total rx_bytes_total driver_epoch
        """,
    ),
    "pci": _of(
        string="""
            pci device_kind vendor_id device_id bound_driver gpu_uuid parent runtime_status path path_links
            slowest narrowest aer_errors port_aer_errors
        """,
        i64="""
            numa_node
        """,
        u64="""
            pcie_gen pcie_gen_max pcie_width pcie_width_max path_gen path_gen_max path_width
            path_width_max aer_corrected_total aer_nonfatal_total aer_fatal_total
            port_aer_corrected_total port_aer_nonfatal_total port_aer_fatal_total
        """,
        boolean="""
            present excluded
        """,
    ),
    "host": _of(
        string="""
            cpu_governor stuck_comm hottest_zone
        """,
        f64="""
            cpu_busy_s_total cpu_iowait_s_total cpu_steal_s_total cpu_clock_mhz cpu_clock_mhz_min
            cpu_clock_median_mhz load1 load15 stuck_s unkillable_s psi_cpu_some_s_total
            psi_cpu_full_s_total psi_memory_some_s_total psi_memory_full_s_total psi_io_some_s_total
            psi_io_full_s_total clock_offset_s clock_error_estimate_s clock_error_max_s
            zone_temperature_c cpu_temperature_c inlet_temperature_c uptime_s
        """,
        u64="""
            cpus processes processes_blocked processes_zombie processes_stuck processes_unkillable
            context_switches_total mem_total_bytes mem_available_bytes swap_used_bytes
            swap_in_pages_total swap_out_pages_total major_faults_total oom_kills_total hugepages
            hugepages_free zones_unreadable fans fans_failed fan_rpm_min kernel_taint units_failed
        """,
        boolean="""
            clock_synchronised
        """,
    ),
    "edac": _of(
        string="""
            dimm label
        """,
        u64="""
            corrected_total uncorrectable_total corrected_day uncorrectable_day
        """,
    ),
    "port": _of(
        string="""
            device link_layer state phys_state signalling guid pci netdev firmware
        """,
        f64="""
            rate_gbps rate_best_gbps
        """,
        u64="""
            port lanes lid sm_lid carrier_changes_total mtu_bytes rx_bytes_total tx_bytes_total
            symbol_errors_total link_error_recovery_total link_downed_total rcv_errors_total
            rcv_remote_physical_errors_total xmit_discards_total local_link_integrity_errors_total
            excessive_buffer_overrun_errors_total vl15_dropped_total xmit_wait_total
            out_of_sequence_total packet_seq_err_total local_ack_timeout_err_total
            rnr_nak_retry_err_total cnp_sent_total cnp_handled_total ecn_marked_packets_total
            rx_icrc_encapsulated_total roce_adp_retrans_total roce_slow_restart_total rx_errors_total
            tx_errors_total rx_dropped_total tx_dropped_total rx_crc_errors_total
        """,
        boolean="""
            in_use interface_up carrier
        """,
    ),
    "disk": _of(
        string="""
            disk state
        """,
        f64="""
            read_s_total write_s_total busy_s_total queue_s_total discard_s_total flush_s_total
            temperature_c smart_temperature_c smart_spare_pct smart_spare_limit_pct smart_used_pct
            smart_age_s
        """,
        u64="""
            read_bytes_total write_bytes_total read_ops_total write_ops_total in_flight
            discard_ops_total flush_ops_total size_bytes degraded smart_warning_bits
            smart_read_bytes_total smart_written_bytes_total smart_power_on_s_total
            smart_unsafe_shutdowns_total smart_media_errors_total smart_logged_errors_total
        """,
        boolean="""
            rotational
        """,
    ),
    "mount": _of(
        string="""
            mount fstype source nfs_address canary_state canary_code
        """,
        f64="""
            canary_s hung_s nfs_read_rtt_s_total nfs_read_exe_s_total nfs_write_rtt_s_total
            nfs_write_exe_s_total nfs_getattr_rtt_s_total nfs_getattr_exe_s_total
            nfs_lookup_rtt_s_total nfs_lookup_exe_s_total
        """,
        u64="""
            size_bytes free_bytes avail_bytes inodes inodes_free nfs_read_ops_total
            nfs_write_ops_total nfs_getattr_ops_total nfs_lookup_ops_total nfs_retransmits_total
            nfs_timeouts_total nfs_backlog_total nfs_bad_xids_total lustre_read_bytes_total
            lustre_write_bytes_total lustre_opens_total lustre_imports lustre_imports_down
        """,
        boolean="""
            network read_only mount_read_only was_writable
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
            workers_running workers_disk workers_sleeping worker_threads pin_threads pin_threads_running
            worker_read_bytes_total worker_read_chars_total messages_lost_total
        """,
    ),
    "agent": _of(
        string="""
            probe error
        """,
        f64="""
            seconds cpu_s_total spool_oldest_s certificate_left_s certificate_life_s bench_gpu_s_total
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
