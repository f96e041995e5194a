"""The bus: what sits in the slots, by sysfs alone. Table `pci`.

Independent of any driver: a card that the driver lost or never took is still a row here, and one that is gone
from here is gone.
"""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 60.0

_S, _U = Type.STRING, Type.U64
_1, _N = Unit.ONE, Unit.COUNT
_ST, _C = Kind.STATE, Kind.COUNTER

METRICS = (
    Metric("pci", _S, Unit.TEXT, Kind.KEY, "PCI address dddd:bb:dd.f (lspci -D)."),
    Metric("device_kind", _S, Unit.TEXT, _ST, "gpu, nvswitch or hca, by vendor and class.", rollup="last"),
    Metric("vendor_id", _S, Unit.TEXT, _ST, "PCI vendor, four hex digits: 10de NVIDIA, 1002 AMD, 15b3 Mellanox (lspci -n).", rollup="last"),
    Metric("device_id", _S, Unit.TEXT, _ST, "PCI device, four hex digits (lspci -n).", rollup="last"),
    Metric("present", Type.BOOL, _1, _ST, "False when the device is listed but reads all ones: fallen off the bus.", rollup="min"),
    Metric("bound_driver", _S, Unit.TEXT, _ST, "Kernel driver that holds it: nvidia, vfio-pci, ...; empty = none (lspci -k).", rollup="last"),
    Metric("gpu_uuid", _S, Unit.TEXT, _ST, "UUID by /proc/driver/nvidia, where the kernel module knows the card.", rollup="last"),
    Metric("excluded", Type.BOOL, _1, _ST, "NVIDIA's module was told to leave the card alone (/proc/driver/nvidia/gpus/*/information).", rollup="last"),
    Metric("pcie_gen", _U, _1, _ST, "PCIe generation of its own link now, from the link speed (lspci -vv LnkSta).", 1, 8, "min"),
    Metric("pcie_gen_max", _U, _1, _ST, "PCIe generation the device can do (lspci -vv LnkCap).", 1, 8, "last"),
    Metric("pcie_width", _U, _1, _ST, "PCIe lanes of its own link now.", 1, 32, "min"),
    Metric("pcie_width_max", _U, _1, _ST, "PCIe lanes the device can do.", 1, 32, "last"),
    Metric("numa_node", Type.I64, _1, _ST, "NUMA node; NULL where the platform does not say.", 0, 4096, "last"),
    Metric("parent", _S, Unit.TEXT, _ST, "PCI address of the upstream port; empty at a root.", rollup="last"),
    Metric("runtime_status", _S, Unit.TEXT, _ST, "active or suspended; a suspended card is not polled awake.", rollup="last"),
    Metric("path", _S, Unit.TEXT, _ST, "Ports between the root and the device, root first, with / between; empty at a root (lspci -PP).", rollup="last"),
    Metric("path_links", _S, Unit.TEXT, _ST, "Every link on the way, root first: address at its lower end, generation x lanes now / possible at both ends.", rollup="last"),
    Metric("path_gen", _U, _1, _ST, "Slowest PCIe generation on the way to the root now.", 1, 8, "min"),
    Metric("path_gen_max", _U, _1, _ST, "PCIe generation that both ends of every link on the way can do.", 1, 8, "last"),
    Metric("path_width", _U, _1, _ST, "Fewest PCIe lanes on the way to the root now.", 1, 32, "min"),
    Metric("path_width_max", _U, _1, _ST, "PCIe lanes that both ends of every link on the way can do.", 1, 32, "last"),
    Metric("slowest", _S, Unit.TEXT, _ST, "Address at the lower end of the slowest link on the way now.", rollup="last"),
    Metric("narrowest", _S, Unit.TEXT, _ST, "Address at the lower end of the narrowest link on the way now.", rollup="last"),
    Metric("aer_corrected_total", _U, _N, _C, "PCIe errors at the device that hardware corrected (cat /sys/bus/pci/devices/*/aer_dev_correctable).", rollup="delta"),
    Metric("aer_nonfatal_total", _U, _N, _C, "PCIe errors at the device that cost a packet (aer_dev_nonfatal).", rollup="delta"),
    Metric("aer_fatal_total", _U, _N, _C, "PCIe errors at the device that cost the link (aer_dev_fatal).", rollup="delta"),
    Metric("aer_errors", _S, Unit.TEXT, _ST, "Kinds of those errors with their counts; empty = none.", rollup="last"),
    Metric("port_aer_corrected_total", _U, _N, _C, "As aer_corrected_total, at the upstream port: either end of a link may be the one that counts.", rollup="delta"),
    Metric("port_aer_nonfatal_total", _U, _N, _C, "As aer_nonfatal_total, at the upstream port.", rollup="delta"),
    Metric("port_aer_fatal_total", _U, _N, _C, "As aer_fatal_total, at the upstream port.", rollup="delta"),
    Metric("port_aer_errors", _S, Unit.TEXT, _ST, "Kinds of those errors with their counts; empty = none.", rollup="last"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row per GPU, NVSwitch and HCA on the bus."""
    return host.pci_devices()
