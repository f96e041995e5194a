"""The judge: stores what agents send and says what is wrong."""

from gpufleet import __version__ as __version__
