"""What every test shares: hypothesis without deadlines, since timings never fail a test here."""

import signal

from hypothesis import settings

# a shell that starts us in the background lets us ignore Ctrl-C, and our children with us: they shall not
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("gpufleet", deadline=None)
settings.load_profile("gpufleet")
