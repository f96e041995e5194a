"""Network ports: InfiniBand and RoCE ports of RDMA devices, and Ethernet cards. Table `port`.

A port is known by its GUID or its place on the bus; `device` and `port` are what it is called this time.
"""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 10.0

_S, _U, _B, _F = Type.STRING, Type.U64, Type.BOOL, Type.F64
_T, _N = Unit.TEXT, Unit.COUNT
_K, _C = Kind.STATE, Kind.COUNTER

METRICS = (
    Metric("device", _S, _T, Kind.KEY, "RDMA device, or interface of an Ethernet card without RDMA (ibstat -l, ip link)."),
    Metric("port", _U, Unit.ONE, Kind.KEY, "Number of the port on its device, from 1 (ibstat).", 1, 255),
    Metric("link_layer", _S, _T, _K, "InfiniBand, Ethernet or Unspecified (ibstat).", rollup="last"),
    Metric("state", _S, _T, _K, "DOWN, INIT, ARMED, ACTIVE or ACTIVE_DEFER; of an Ethernet card by its carrier (ibstat).", rollup="last"),
    Metric("phys_state", _S, _T, _K, "LinkUp, Polling, Disabled, ...; RDMA ports only (ibstat).", rollup="last"),
    Metric("rate_gbps", _F, Unit.GBIT_PER_S, _K, "Speed of the link while it is active (ibstat, ethtool).", 0.001, 100_000, "min"),
    Metric("lanes", _U, _N, _K, "Lanes in use while it is active, the 4 of 4X (ibstat).", 1, 16, "min"),
    Metric("signalling", _S, _T, _K, "Signalling while it is active: NDR, HDR, EDR, ... (iblinkinfo).", rollup="last"),
    Metric("rate_best_gbps", _F, Unit.GBIT_PER_S, _K, "Fastest the agent saw it, forgotten an hour after it was last that fast.", 0.001, 100_000, "last"),
    Metric("in_use", _B, Unit.ONE, _K, "The agent saw it active within the last hour.", rollup="last"),
    Metric("lid", _U, Unit.ONE, _K, "Local identifier that the subnet manager gave; 0 = none (ibstat).", 0, 65535, "last"),
    Metric("sm_lid", _U, Unit.ONE, _K, "Local identifier of the subnet manager; 0 = none (ibstat).", 0, 65535, "last"),
    Metric("guid", _S, _T, _K, "GUID of the port, of an Ethernet one that of its device (ibstat).", rollup="last"),
    Metric("pci", _S, _T, _K, "PCI address of the device (lspci -D).", rollup="last"),
    Metric("netdev", _S, _T, _K, "Network interface of the port (rdma link, ip link).", rollup="last"),
    Metric("firmware", _S, _T, _K, "Firmware of the device (ibstat).", rollup="last"),
    Metric("interface_up", _B, Unit.ONE, _K, "The interface is switched on by the administrator (ip link: UP).", rollup="last"),
    Metric("carrier", _B, Unit.ONE, _K, "The interface has a carrier (ip link: LOWER_UP).", rollup="min"),
    Metric("carrier_changes_total", _U, _N, _C, "Times the carrier came or went (ip -s -s link).", rollup="delta"),
    Metric("mtu_bytes", _U, Unit.BYTE, _K, "Largest packet of the interface (ip link).", 0, 1 << 20, "last"),
    Metric("rx_bytes_total", _U, Unit.BYTE, _C, "Bytes received: of RDMA ports 4 x port_rcv_data (perfquery -x).", rollup="delta"),
    Metric("tx_bytes_total", _U, Unit.BYTE, _C, "Bytes sent: of RDMA ports 4 x port_xmit_data (perfquery -x).", rollup="delta"),
    Metric("symbol_errors_total", _U, _N, _C, "Symbols that could not be decoded (perfquery: SymbolErrorCounter).", rollup="delta"),
    Metric("link_error_recovery_total", _U, _N, _C, "Times the link trained anew and came back (perfquery: LinkErrorRecoveryCounter).", rollup="delta"),
    Metric("link_downed_total", _U, _N, _C, "Times the link went down (perfquery: LinkDownedCounter).", rollup="delta"),
    Metric("rcv_errors_total", _U, _N, _C, "Packets received with an error (perfquery: PortRcvErrors).", rollup="delta"),
    Metric("rcv_remote_physical_errors_total", _U, _N, _C, "Packets that were marked bad before they came here (perfquery: PortRcvRemotePhysicalErrors).", rollup="delta"),
    Metric("xmit_discards_total", _U, _N, _C, "Packets dropped because the port was down or congested (perfquery: PortXmitDiscards).", rollup="delta"),
    Metric("local_link_integrity_errors_total", _U, _N, _C, "Times errors of the link passed its threshold (perfquery: LocalLinkIntegrityErrors).", rollup="delta"),
    Metric("excessive_buffer_overrun_errors_total", _U, _N, _C, "Times buffers overran repeatedly (perfquery: ExcessiveBufferOverrunErrors).", rollup="delta"),
    Metric("vl15_dropped_total", _U, _N, _C, "Management packets dropped (perfquery: VL15Dropped).", rollup="delta"),
    Metric("xmit_wait_total", _U, _N, _C, "Ticks in which data waited to be sent (perfquery: PortXmitWait).", rollup="delta"),
    Metric("out_of_sequence_total", _U, _N, _C, "Packets that came out of order (rdma statistic: out_of_sequence).", rollup="delta"),
    Metric("packet_seq_err_total", _U, _N, _C, "Negative acknowledgements for lost packets (rdma statistic: packet_seq_err).", rollup="delta"),
    Metric("local_ack_timeout_err_total", _U, _N, _C, "Times no acknowledgement came in time (rdma statistic: local_ack_timeout_err).", rollup="delta"),
    Metric("rnr_nak_retry_err_total", _U, _N, _C, "Receivers that were never ready (rdma statistic: rnr_nak_retry_err).", rollup="delta"),
    Metric("cnp_sent_total", _U, _N, _C, "Congestion notifications sent (rdma statistic: np_cnp_sent).", rollup="delta"),
    Metric("cnp_handled_total", _U, _N, _C, "Congestion notifications obeyed (rdma statistic: rp_cnp_handled).", rollup="delta"),
    Metric("ecn_marked_packets_total", _U, _N, _C, "Packets that a switch marked as congested (rdma statistic: np_ecn_marked_roce_packets).", rollup="delta"),
    Metric("rx_icrc_encapsulated_total", _U, _N, _C, "RoCE packets with a bad checksum (rdma statistic: rx_icrc_encapsulated).", rollup="delta"),
    Metric("roce_adp_retrans_total", _U, _N, _C, "Adaptive retransmissions (rdma statistic: roce_adp_retrans).", rollup="delta"),
    Metric("roce_slow_restart_total", _U, _N, _C, "Times sending began anew, slowly (rdma statistic: roce_slow_restart).", rollup="delta"),
    Metric("rx_errors_total", _U, _N, _C, "Bad packets received; Ethernet only, like those below (ip -s link).", rollup="delta"),
    Metric("tx_errors_total", _U, _N, _C, "Packets that could not be sent (ip -s link).", rollup="delta"),
    Metric("rx_dropped_total", _U, _N, _C, "Packets received and dropped (ip -s link).", rollup="delta"),
    Metric("tx_dropped_total", _U, _N, _C, "Packets dropped instead of sent (ip -s link).", rollup="delta"),
    Metric("rx_crc_errors_total", _U, _N, _C, "Packets received with a bad checksum (ip -s -s link).", rollup="delta"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row per port."""
    return host.rows("port")
