"""YAML with lines: scalars of YAML 1.2, repeated keys, hostile documents."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.config.yaml_tree import read_yaml
from loka_onnx.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-3.", -3.0),
        ("+7", 7),
        ("0010", 10),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("True", True),
        ("false", False),
        ("12:30:45", "12:30:45"),
        ("2026-11-21", "2026-11-21"),
        ("1_000", "1_000"),
        ("~", None),
        ("null", None),
        ("'null'", "null"),
        ('"7"', "7"),
        ("!!str 7", "7"),
        ("-.inf", -math.inf),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("<<", "<<"),
        ("12345678901234567890123", 12345678901234567890123.0),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = read_yaml(text, "x").data
    assert found == value and type(found) is type(value)


def test_not_a_number():
    assert math.isnan(read_yaml(".nan", "x").data)


def test_every_key_and_item_has_its_line():
    document = read_yaml("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n", "run.yaml")
    assert document.data == {"a": 1, "b": ["x", {"c": 2, "d": 3}]}
    assert document.places == {
        ("a",): "run.yaml:1",
        ("b",): "run.yaml:2",
        ("b", 0): "run.yaml:3",
        ("b", 1): "run.yaml:4",
        ("b", 1, "c"): "run.yaml:4",
        ("b", 1, "d"): "run.yaml:5",
    }
    assert document.place(("b", 1, "absent", 0)) == "run.yaml:4"
    assert document.place(("absent",)) == "run.yaml"


def test_a_repeated_key_is_refused_and_an_alias_is_none():
    with pytest.raises(ConfigError) as caught:
        read_yaml("data:\n  group: a\n  slices: []\n  group: b\n", "run.yaml")
    assert str(caught.value) == (
        "run.yaml:4: the key 'group' is given twice\n"
        "  evidence: it already stands at run.yaml:2\n"
        "  remedy: keep one of the two"
    )
    assert read_yaml("a: &x [1]\nb: *x", "x").data == {"a": [1], "b": [1]}
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        read_yaml("\n".join(lines), "run.yaml")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: [1\nb: 2", 2, "the run file is not valid YAML"),
        ("a: 1\n\tb: 2", 2, "the run file is not valid YAML"),
        ("a: 1\n---\nb: 2", 2, "the run file is not valid YAML"),
        ("a: *nowhere", 1, "the run file is not valid YAML"),
        ("a:\n  3: x", 2, "a key must be a word"),
        ("? [a, b]\n: x", 1, "a key must be a word"),
        ("a: 1\nb: !!python/name:os.system x", 2, "the tag 'tag:yaml.org,2002:python/name:os.system'"),
        ("a: !!binary aGk=", 1, "the tag 'tag:yaml.org,2002:binary' does not fit or is not allowed here"),
        ("a: !!int x", 1, "the tag 'tag:yaml.org,2002:int' does not fit or is not allowed here"),
        ("a: !!bool x", 1, "the tag 'tag:yaml.org,2002:bool' does not fit or is not allowed here"),
        ("a: !list [x]", 1, "the tag '!list' does not fit or is not allowed here"),
        ("a: !!set {x}", 1, "the tag 'tag:yaml.org,2002:set' does not fit or is not allowed here"),
        ('a: "\\ud800"', 1, "the text is not Unicode"),
        ("a: &a [*a]", 1, "the run file repeats itself without end"),
    ],
)
def test_refused(text, line, what):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "run.yaml")
    assert caught.value.what.startswith(what)
    assert caught.value.where == f"run.yaml:{line}"
    assert caught.value.evidence and caught.value.remedy


@pytest.mark.parametrize("text", ["\x00", "[" * 5000, "a: !!float x"])
def test_hostile_text_is_a_user_error(text):
    with pytest.raises(ConfigError):
        read_yaml(text, "run.yaml")


# Beyond it JSON writes surrogate pairs, which YAML's \u does not know.
BASIC_PLANE = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(BASIC_PLANE),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(BASIC_PLANE, max_size=9), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_json_is_yaml(value):
    """JSON is a subset of YAML 1.2, which makes the standard library's writer an independent reference."""
    assert read_yaml(json.dumps(value), "x").data == value
