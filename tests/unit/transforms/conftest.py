"""Makes the models and cases of this folder importable to the tests of every room below it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
