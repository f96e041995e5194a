"""What every test shares: hypothesis without deadlines, since timings never fail a test here."""

from hypothesis import settings

settings.register_profile("gpufleet", deadline=None)
settings.load_profile("gpufleet")
