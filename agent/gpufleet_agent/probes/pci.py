"""The bus: what sits in the slots, by sysfs alone. Table `pci`.

Independent of any driver: a card that the driver lost or never took is still a row here, and one that is gone
from here is gone.
"""

from collections.abc import Iterable

from gpufleet.metric import Kind, Metric, Row, Type, Unit
from gpufleet_agent.drivers import Host

EVERY = 60.0

_S, _U = Type.STRING, Type.U64

METRICS = (
    Metric("pci", _S, Unit.TEXT, Kind.KEY, "PCI address dddd:bb:dd.f (lspci -D)."),
    Metric("device_kind", _S, Unit.TEXT, Kind.STATE, "gpu, nvswitch or hca, by vendor and class.", rollup="last"),
    Metric("vendor_id", _S, Unit.TEXT, Kind.STATE, "PCI vendor, four hex digits: 10de NVIDIA, 1002 AMD, 15b3 Mellanox (lspci -n).", rollup="last"),
    Metric("device_id", _S, Unit.TEXT, Kind.STATE, "PCI device, four hex digits (lspci -n).", rollup="last"),
    Metric("present", Type.BOOL, Unit.ONE, Kind.STATE, "False when the device is listed but reads all ones: fallen off the bus.", rollup="min"),
    Metric("bound_driver", _S, Unit.TEXT, Kind.STATE, "Kernel driver that holds it: nvidia, vfio-pci, ...; empty = none (lspci -k).", rollup="last"),
    Metric("gpu_uuid", _S, Unit.TEXT, Kind.STATE, "UUID by /proc/driver/nvidia, where the kernel module knows the card.", rollup="last"),
    Metric("excluded", Type.BOOL, Unit.ONE, Kind.STATE, "NVIDIA's module was told to leave the card alone (/proc/driver/nvidia/gpus/*/information).", rollup="last"),
    Metric("pcie_gen", _U, Unit.ONE, Kind.STATE, "PCIe generation now, from the link speed (lspci -vv LnkSta).", 1, 8, "min"),
    Metric("pcie_gen_max", _U, Unit.ONE, Kind.STATE, "PCIe generation the device can do (lspci -vv LnkCap).", 1, 8, "last"),
    Metric("pcie_width", _U, Unit.ONE, Kind.STATE, "PCIe lanes now.", 1, 32, "min"),
    Metric("pcie_width_max", _U, Unit.ONE, Kind.STATE, "PCIe lanes the device can do.", 1, 32, "last"),
    Metric("numa_node", Type.I64, Unit.ONE, Kind.STATE, "NUMA node; NULL where the platform does not say.", 0, 4096, "last"),
    Metric("parent", _S, Unit.TEXT, Kind.STATE, "PCI address of the upstream port; empty at a root.", rollup="last"),
    Metric("runtime_status", _S, Unit.TEXT, Kind.STATE, "active or suspended; a suspended card is not polled awake.", rollup="last"),
)  # fmt: skip


def read(host: Host, /) -> Iterable[Row]:
    """One row per GPU, NVSwitch and HCA on the bus."""
    return host.pci_devices()
