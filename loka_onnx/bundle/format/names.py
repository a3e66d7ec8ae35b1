"""Default name of a bundle."""

from __future__ import annotations

import os
from pathlib import Path


def name_of(bundle: Path) -> str:
    """Name of its directory (``ranker-1.5``), with links resolved, or of its single file without the
    suffix.
    """
    place = Path(os.path.realpath(bundle))
    return place.stem if place.is_file() else place.name
