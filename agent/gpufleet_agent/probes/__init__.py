"""Every probe. One probe = one file = one table = one config key `[probes.<name>]`."""

from gpufleet_agent.probe import Probe
from gpufleet_agent.probes import gpu, gpu_health, host, job, loader, pci

PROBES: dict[str, Probe] = {
    "gpu": gpu,
    "gpu_health": gpu_health,
    "pci": pci,
    "host": host,
    "job": job,
    "loader": loader,
}
"""Probes of the sampler, by name. `agent` (probes/agent.py) is read by the supervisor about itself."""
