"""Putting sites that were measured again among the others of an earlier profile."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.profile import (
    DeltaSums,
    Profile,
    Sampling,
    Sensitivity,
    SensitivityName,
    SiteGroup,
    SiteProfile,
    WeightedMean,
)
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.pipeline.probing import changed_sites, with_partners, with_sites, without_removed_sites

ONE = ExactSum.of([1.0])


def number(value: float) -> ExactSum:
    return ExactSum.of([value])


def site(name: str) -> Site:
    operands = (Operand(f"{name}.x", 0, False, 1, (None, 16)), Operand(f"{name}.w", 1, True, 0, (16, 16)))
    return Site(name, SiteKind.LINEAR, "MatMul", operands, f"{name}.y", 16, 16, 1)


def model_of(*names: str, digest: str = "m") -> ModelArtifact:
    return ModelArtifact(Path("model.onnx"), digest, 21, (), (), tuple(map(site, names)), "test")


def sensitivity(value: float) -> Sensitivity:
    moments = RatioMoments(100, 100, number(value), ONE, ONE, ONE, ONE)
    return Sensitivity.of(
        SensitivityName(PER_TENSOR.id, "ctr", "loss"), DeltaSums(ONE, ONE, ONE), moments, None
    )


def profile_of(names: tuple[str, ...], value: float = 1.0, **changes: object) -> Profile:
    """Every figure of a site is `value`."""
    ranges = RangeStats(1, value, 0.0, value, ONE, ONE)
    entries = tuple(
        SiteProfile(
            name,
            {f"{name}.x": ranges, f"{name}.w": ranges},
            (ErrorStats(PER_TENSOR.id, value, 1, ONE, ONE, 1, 0, 0),),
            (sensitivity(value),),
        )
        for name in names
    )
    whole = Profile(
        model_digest="m",
        data_digest="d",
        rows=100,
        error_rows=100,
        sampling=Sampling(100, 1, 16384),
        synthetic=False,
        sites=entries,
        baseline_loss={"ctr": WeightedMean(ONE, ONE)},
        scales={PER_TENSOR.activation_id: {f"{name}.x": value for name in names}},
        seconds={"ranges": number(value)},
        weights=tuple(sorted(f"{name}.w" for name in names)),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def group(*names: str, value: float = 1.0) -> SiteGroup:
    return SiteGroup("x", names, (sensitivity(value),))


# Sites ------------------------------------------------------------------------------------------------


def test_what_a_mod_left_alone_is_not_measured_again():
    assert changed_sites(profile_of(("a", "b")), model_of("b", "a", digest="n")) == frozenset()


def test_sites_that_a_mod_changed_are_measured_again():
    """New ones, ones that replace themselves or others, and ones whose weight was written anew."""
    model = model_of("a", "b", "c", "d")
    replaced = replace(model.sites[1], merged_from=("b",))
    weight = replace(model.sites[2].operands[1], tensor="c.weight.padded")
    padded = replace(model.sites[2], operands=(model.sites[2].operands[0], weight))
    model = replace(model, sites=(model.sites[0], replaced, padded, model.sites[3]))
    assert changed_sites(profile_of(("a", "b", "c")), model) == {"b", "c", "d"}


def test_the_later_sites_take_the_place_of_the_earlier_ones_in_the_models_order():
    earlier, later = profile_of(("a", "b", "c")), profile_of(("b",), 2.0)
    found = with_sites(earlier, later, model_of("c", "b", "a"))
    assert [entry.site for entry in found.sites] == ["c", "b", "a"]
    assert found.site("b") == later.site("b") and found.site("a") == earlier.site("a")
    assert found.scales == {PER_TENSOR.activation_id: {"a.x": 1.0, "b.x": 2.0, "c.x": 1.0}}
    assert found.seconds["ranges"].value == 3.0
    assert found.baseline_loss == earlier.baseline_loss


def test_sites_that_the_model_lacks_are_left_out_with_their_weights_and_groups():
    earlier = profile_of(("a", "b", "c", "d"), groups=(group("a", "b"), group("c", "d")))
    later = profile_of(("ab",), 2.0)
    found = with_sites(earlier, later, model_of("ab", "c", "d", digest="modified"))
    assert found.model_digest == "modified"
    assert [entry.site for entry in found.sites] == ["ab", "c", "d"]
    assert found.weights == ("ab.w", "c.w", "d.w")
    assert found.groups == (group("c", "d"),)


def test_groups_that_hold_a_site_that_was_measured_again_are_the_later_ones():
    earlier = profile_of(("a", "b", "c", "d"), groups=(group("a", "b"), group("c", "d")))
    later = profile_of(("a", "b"), groups=(group("a", "b", value=2.0),))
    found = with_sites(earlier, later, model_of("a", "b", "c", "d"))
    assert found.groups == (group("a", "b", value=2.0), group("c", "d"))
    # Even where there is none any more, and in the model's order.
    assert with_sites(earlier, replace(later, groups=()), model_of("a", "b", "c", "d")).groups == (
        group("c", "d"),
    )
    turned = with_sites(earlier, later, model_of("c", "d", "a", "b"))
    assert [g.sites for g in turned.groups] == [("c", "d"), ("a", "b")]


def test_what_is_said_of_all_sites_is_true_of_each():
    fixed = profile_of(("a", "b"), error_rows=60, sampling=Sampling(100, 1, 16384, ("a", "b")))
    stopped = profile_of(("b",), error_rows=80, sampling=Sampling(40, 1, 16384, may_stop_early=True))
    for earlier, later in ((fixed, stopped), (replace(fixed, sampling=stopped.sampling), fixed)):
        found = with_sites(earlier, replace(later, sites=later.sites[-1:]), model_of("a", "b"))
        assert (found.rows, found.error_rows, found.sampling.rows) == (100, 60, 40)
        assert found.sampling.is_sequential
    found = with_sites(fixed, stopped, model_of("a", "b"))
    assert found.sampling.undecided == ("a",)  # b was left open, and then decided


def test_a_model_whose_sites_are_all_known_carries_the_profile():
    earlier = profile_of(("a", "b", "c"), groups=(group("a", "b"), group("b", "c")))
    found = without_removed_sites(earlier, model_of("c", "b", digest="modified"))
    assert (found.model_digest, [entry.site for entry in found.sites]) == ("modified", ["c", "b"])
    assert found.groups == (group("b", "c"),)
    assert found.sampling == earlier.sampling


# Partners ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    """one and two read x, of which two reads a view; thin reads x as well; last reads something else."""
    path = tmp_path_factory.mktemp("shared") / "model.onnx"
    proto = parsed(
        "[one] a = MatMul(x, w1)  v = Identity(x)  [two] b = MatMul(v, w2)  c = Add(a, b)"
        "[last] y = MatMul(c, w3)  [thin] z = MatMul(x, w4)",
        {**{f"w{i}": np.ones((16, 16)) for i in (1, 2, 3)}, "w4": np.ones((16, 8))},
        inputs="float[batch,16] x",
        outputs="float[batch,16] y, float[batch,8] z",
    )
    for node in proto.graph.node:
        node.name = node.name or f"inner/{node.output[0]}"
    onnx.save(proto, path)
    graph = GraphModel.load(path)
    return ModelArtifact(path, graph.save(path), 21, (), (), find_sites(graph), "test")


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({"one"}, {"one", "two"}),
        ({"two", "last"}, {"one", "two", "last"}),
        ({"last"}, {"last"}),
        ({"thin"}, {"thin"}),  # it would read the exact tensor
        (set(), set()),
    ],
)
def test_sites_that_share_a_tensor_in_fp8_come_along(shared, chosen, found):
    assert with_partners(shared, chosen) == found
