"""Times from a GPU, measured elsewhere in one run, put beside what was measured here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

OF_MODELS = ("beside", "compared")
"""Parts of the document, beside the times, that are told by model."""


class DeviceTimesDoNotFit(ValueError):
    """The document is of other models or graphs, or has no times."""


def merged(figures: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures with device columns.

    Args:
        figures: Of the record: ``models[model].variants[variant]``.
        document: What `on_device` wrote: ``models[model][variant][engine]`` (times by batch size, or why
            there are none), ``beside[model]`` (the same of graphs that were added there),
            ``compared[model]``, and whatever else says where and how they were taken.

    Returns:
        The figures, each variant with ``device[engine]`` and each model with ``beside`` and ``compared``; and
        the rest of the document.

    Raises:
        DeviceTimesDoNotFit: It has times of a model or a variant that the figures do not have, or none.
    """
    found = copy.deepcopy(dict(figures))
    times = document.get("models")
    if not times:
        raise DeviceTimesDoNotFit(
            f"no times in the document; it has {', '.join(sorted(document)) or 'nothing'}"
        )
    for model, variants in times.items():
        if model not in found["models"]:
            raise DeviceTimesDoNotFit(f"times of model '{model}', which was not compared here")
        known = found["models"][model]["variants"]
        for variant, engines in variants.items():
            if variant not in known:
                raise DeviceTimesDoNotFit(
                    f"times of '{variant}' of model '{model}', which was not compared here"
                )
            known[variant]["device"] = engines
        for part in OF_MODELS:
            known[part] = document.get(part, {}).get(model, {})
        for part in OF_MODELS:
            found["models"][model][part] = document.get(part, {}).get(model, {})
    return found, {key: value for key, value in document.items() if key not in {"models", *OF_MODELS}}
