"""Contents of a bundle whose requests go to two engines of this host by their size."""

import dataclasses

from loka_onnx.bundle.writer import BundleContents
from loka_onnx.core.evaluation import Choice, Route

FP32, FP8 = 1, 2
"""Places of two engines for this host among those of the sample; they answer differently."""


def routed(
    contents: BundleContents, *routes: tuple[int, int], places: tuple[int, ...] = (FP32, FP8)
) -> BundleContents:
    """The contents with the engines of these places, the first one main, and routes of (rows, place)."""
    artifacts = [engine.artifact for engine in contents.engines]
    table = tuple(Route(rows, artifacts[place].id, artifacts[place].plan) for rows, place in routes)
    main = artifacts[places[0]]
    choice = dataclasses.replace(
        contents.choice.targets[0], target=main.target, engine=main.id, plan=main.plan, routes=table
    )
    engines = tuple(contents.engines[place] for place in places)
    return dataclasses.replace(contents, engines=engines, choice=Choice((choice,)))
