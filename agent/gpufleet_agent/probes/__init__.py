"""Every probe. One probe = one file = one table = one config key `[probes.<name>]`."""

from gpufleet_agent.probe import Probe
from gpufleet_agent.probes import disk, edac, gpu, gpu_health, host, job, loader, mount, nvlink, pci, port

PROBES: dict[str, Probe] = {
    "gpu": gpu,
    "gpu_health": gpu_health,
    "nvlink": nvlink,
    "pci": pci,
    "port": port,
    "host": host,
    "edac": edac,
    "disk": disk,
    "mount": mount,
    "job": job,
    "loader": loader,
}
"""Probes of the sampler, by name. `agent` (probes/agent.py) is read by the supervisor about itself."""
