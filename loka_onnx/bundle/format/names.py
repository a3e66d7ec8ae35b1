"""What a bundle is called where nobody says so."""

from __future__ import annotations

import os
from pathlib import Path


def name_of(bundle: Path) -> str:
    """The name of its directory as it is (``ranker-1.5``), or of its single file without the suffix."""
    place = Path(os.path.realpath(bundle))
    return place.stem if place.is_file() else place.name
