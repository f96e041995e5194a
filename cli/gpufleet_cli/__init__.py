"""The on-call: shows what the collector knows."""

from gpufleet import __version__ as __version__
