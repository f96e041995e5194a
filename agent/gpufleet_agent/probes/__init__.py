"""Every probe. One probe = one file = one table = one config key `[probes.<name>]`."""

from gpufleet_agent.probe import Probe
from gpufleet_agent.probes import disk, gpu, gpu_health, host, mount, pci

PROBES: dict[str, Probe] = {
    "gpu": gpu,
    "gpu_health": gpu_health,
    "pci": pci,
    "host": host,
    "disk": disk,
    "mount": mount,
}
"""Probes of the sampler, by name. `agent` (probes/agent.py) is read by the supervisor about itself."""
