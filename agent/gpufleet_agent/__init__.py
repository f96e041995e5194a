"""The node: samples its host and streams what it read."""

from gpufleet import __version__ as __version__
