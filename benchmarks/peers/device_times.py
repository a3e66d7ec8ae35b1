"""Times from a GPU, measured elsewhere, put beside what was measured here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

BESIDE, OF_MODELS = "beside", ("beside", "compared", "digests")
"""Parts of the document, beside the times, that are told by model."""


class DeviceTimesDoNotFit(ValueError):
    """The document is of other models or graphs, or has no times."""


def merged(figures: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures with device columns.

    Args:
        figures: Of the record: ``models[model].variants[variant]``.
        document: What `on_device` wrote: ``models[model][variant][engine]`` (times by batch size, or why
            there are none), ``beside[model]`` (the same of graphs that were added there), ``digests[model]``
            (of the graphs as tools wrote them), and whatever else says where and how they were taken. What it
            compared is left out: the record has the verdicts.

    A variant that has times already is refused: a table has one time of each. Those of a second document are
    marked, because they were not taken in turns with the others.

    Returns:
        The figures, each variant with ``device[engine]`` and each model with ``beside``; and the rest of the
        document. What was added there and has a row here goes to its row.

    Raises:
        DeviceTimesDoNotFit: It has times of a model, a variant or a graph that the figures do not have, or
            none.
    """
    found = copy.deepcopy(dict(figures))
    times = document.get("models")
    if not times:
        raise DeviceTimesDoNotFit(
            f"no times in the document; it has {', '.join(sorted(document)) or 'nothing'}"
        )
    is_later = any("device" in each for m in found["models"].values() for each in m["variants"].values())
    for model, variants in times.items():
        if model not in found["models"]:
            raise DeviceTimesDoNotFit(f"times of model '{model}', which was not compared here")
        known = found["models"][model]["variants"]
        _check_graphs(model, known, document.get("digests", {}).get(model, {}))
        added = document.get(BESIDE, {}).get(model, {})
        for variant, engines in (variants | {name: added[name] for name in added if name in known}).items():
            if variant not in known:
                raise DeviceTimesDoNotFit(
                    f"times of '{variant}' of model '{model}', which was not compared here"
                )
            if "device" in known[variant]:
                raise DeviceTimesDoNotFit(f"'{variant}' of model '{model}' has times already")
            known[variant] |= {"device": engines} | ({"timed_later": True} if is_later else {})
        beside = {name: each for name, each in added.items() if name not in known}
        found["models"][model][BESIDE] = beside if not is_later else found["models"][model].get(BESIDE, {})
    return found, {key: value for key, value in document.items() if key not in {"models", *OF_MODELS}}


def _check_graphs(model: str, known: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    for variant, digest in digests.items():
        ours = known.get(variant, {}).get("digest", digest)
        if ours != digest:
            raise DeviceTimesDoNotFit(
                f"times of '{variant}' of model '{model}' are of another graph: {digest}, not {ours}"
            )
