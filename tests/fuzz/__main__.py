"""Runs the fuzzer; its children find what they run in `tests.fuzz.running`."""

import sys

from tests.fuzz.running import main

sys.exit(main())
