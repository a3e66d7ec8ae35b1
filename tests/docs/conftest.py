"""What the tests of the documentation share."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# `docs_site` and `benchmarks` are packages of the root, the synthetic run is one of the integration tests.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "integration")]
