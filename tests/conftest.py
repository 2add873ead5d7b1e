"""What all tests need of the process that they run in."""

from __future__ import annotations

import signal

# A shell without job control starts what it puts into the background with Ctrl-C ignored, and so would every process be
# that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
