"""What every test may rely on, however the test run itself was started."""

from __future__ import annotations

import signal

# A run in the background of a script inherits an ignored Ctrl-C, and would hand that down to every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
