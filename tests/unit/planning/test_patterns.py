"""What patterns name: sites, what they were merged from, modules, and other nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_models import linear

from loka_onnx.errors import ConfigError
from loka_onnx.planning.patterns import named_places

SITES = (
    linear("bottom.fc1"),
    replace(linear("experts.0.fc1+63_more"), merged_from=("experts.0.fc1", "experts.17.fc1")),
    linear("tower.calibrator.fc"),
    linear("head"),
)
NODES = ("bottom/relu", "tower.scale/mul", "tower.scale/add", "/div")


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("head", ["head"]),
        ("*.fc1", ["bottom.fc1", "experts.0.fc1+63_more"]),
        ("bottom", ["bottom.fc1"]),
        ("*.calibrator", ["tower.calibrator.fc"]),
        # A name from before the mods.
        ("experts.17.fc1", ["experts.0.fc1+63_more"]),
        ("experts.17", ["experts.0.fc1+63_more"]),
        ("tower*", ["tower.calibrator.fc"]),
    ],
)
def test_sites(pattern: str, sites: list[str]) -> None:
    named = named_places((pattern,), SITES, NODES, "plan.keep")
    assert named.sites == dict.fromkeys(sites, pattern) and not named.nodes


@pytest.mark.parametrize(
    ("pattern", "nodes"),
    [
        ("tower.scale", ["tower.scale/mul", "tower.scale/add"]),
        ("*.scale/mul", ["tower.scale/mul"]),
        ("/div", ["/div"]),
        ("*relu", ["bottom/relu"]),
    ],
)
def test_a_pattern_that_names_no_site_names_nodes(pattern: str, nodes: list[str]) -> None:
    named = named_places((pattern, "head"), SITES, NODES, "plan.keep")
    assert (named.sites, named.nodes) == ({"head": "head"}, dict.fromkeys(nodes, pattern))


@pytest.mark.parametrize("pattern", ["fc1", "experts.18.fc1", "tow", "scale", "tower.scale/m"])
def test_what_is_near_is_named_in_the_refusal(pattern: str) -> None:
    with pytest.raises(ConfigError, match=f"pattern '{pattern}' matches no site and no node"):
        named_places((pattern,), SITES, NODES, "plan.keep")
    with pytest.raises(ConfigError, match=r"the nearest of 4 sites is 'experts\.17\.fc1'"):
        named_places(("experts.18.fc1",), SITES, NODES, "plan.keep")
