"""The generated reference: complete, and as the sources say it."""

import inspect
import logging
import re
from pathlib import Path

import pytest

import loka_onnx
from docs_site import api, command_line
from docs_site.command_line import ENVIRONMENT, command_line_page, verbs
from docs_site.run_file import run_file_page
from docs_site.schemas import schema_files, schemas_page
from loka_onnx.config import run_file_schema

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_on_a_page() -> None:
    named = [name for group in api.GROUPS for name in group.names]
    assert sorted(named) == sorted(loka_onnx.__all__)


def test_every_type_of_a_public_signature_is_on_a_page() -> None:
    """What a public name takes or returns can be looked up."""
    shown = {name.rpartition(".")[2] for group in api.GROUPS for name in (*group.names, *group.types)}
    elsewhere = {
        # Aliases of standard types, and functions that are handed in.
        *("Arrays", "Progress", "Outcome", "Run", "Fusions", "Precision", "Corrections", "Mod"),
        # Values that one stage makes and another takes, without use of their own.
        *("Parity", "Split", "Reference", "Outlook"),
    }
    for name in loka_onnx.__all__:
        value = getattr(loka_onnx, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        for parameter in [*inspect.signature(value).parameters.values(), inspect.signature(value)]:
            annotation = getattr(parameter, "annotation", None) or parameter.return_annotation
            for each in re.findall(r"\b[A-Z]\w+", str(annotation)) if isinstance(annotation, str) else []:
                found = getattr(inspect.getmodule(value), each, None)
                if inspect.isclass(found) and found.__module__.startswith("loka_onnx"):
                    assert each in shown | elsewhere, f"{name} has {each}, which no page shows"


def test_pages_name_what_exists() -> None:
    for group in api.GROUPS:
        for name in (*group.names, *group.types):
            module, _, attribute = f"loka_onnx.{name}".rpartition(".")
            assert hasattr(__import__(module, fromlist=[attribute]), attribute), name
    pages = api.api_pages()
    assert "::: loka_onnx.run\n" in pages["reference/api/runs.md"]
    assert "[`load`](serving.md#loka_onnx.load)" in pages["reference/api/index.md"]


def test_every_verb_and_option_is_told() -> None:
    page = command_line_page()
    found = list(verbs())
    assert {"loka-onnx run", "loka-onnx bundle push", "loka-onnx doctor"} <= {verb.name for verb in found}
    for verb in found:
        section = page.partition(f"# {verb.name}\n")[2].partition("\n## ")[0]
        for parameter in verb.command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert option in section, f"{verb.name} {option}"
    assert "| `--port <int>` | Port; 0 for any that is free. (default: 8000; 0<=x<=65535) |" in page
    assert "`<name>`" in page, "a placeholder is not swallowed as HTML"
    assert "loka-onnx bundle sign [OPTIONS] DIR\n" in page


def test_exit_codes_are_those_of_the_errors() -> None:
    codes = command_line_page().partition("## Exit codes")[2]
    assert re.search(r"\| `3` \| .* `CheckFailed`, `DriftFound`, `BundleInvalid`, `BudgetMissed` \|", codes)
    assert re.search(r"\| `2` \| .*`MissingPackage` \|", codes)
    assert "| `130` |" in codes and "| `143` |" in codes


@pytest.mark.slow
def test_every_variable_that_is_read_is_told() -> None:
    """Those that begin with our name, and those of others that we read by a literal name."""
    read = set()
    for path in [*(ROOT / "loka_onnx").rglob("*.py"), *(ROOT / "loka_zoo").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"\bLOKA_ONNX_[A-Z_]+", text))
        read |= set(re.findall(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"", text))
    # What is only looked at to know a terminal or the user's directories.
    assert set(ENVIRONMENT) == read - {"TERM", "XDG_CACHE_HOME", "COLUMNS", "CI"}
    assert all(f"| `{name}` |" in command_line.command_line_page() for name in ENVIRONMENT)


def test_every_key_of_the_run_file_is_told() -> None:
    page = run_file_page()
    schema = run_file_schema()
    for name, held in [("the file", schema), *schema["$defs"].items()]:
        for key, value in held.get("properties", {}).items():
            assert re.search(rf"\| \**`{key}`\** \|", page), f"{name}: {key}"
            assert value.get("description"), f"{name}: {key} has no description"
    assert "| **`model`** | [mapping](#model) |  |" in page
    assert "| `budget` | number > 0.0, ≤ 1.0 | `0.0002` |" in page
    assert "| `min` | integer ≥ 1, ≤ 1,048,576 | `1` |" in page
    assert "| **`kind`** | `logit`, `probability`, `regression` |" in page
    anchors = {re.sub(r"[^\w-]", "", title.lower()) for title in re.findall(r"^###? (\S+)$", page, re.M)}
    assert set(re.findall(r"\[mapping\]\(#([^)]+)\)", page)) <= anchors


def test_every_schema_that_is_published_is_listed() -> None:
    page = schemas_page(ROOT / "docs")
    for path in (ROOT / "docs").glob("*-schema.json"):
        assert f"[`{path.name}`](../{path.name})" in page
    assert "loka-onnx/profile/" in page
    assert "reference/run-file-schema.json" in schema_files()


def test_formulas_become_mathml(caplog: pytest.LogCaptureFixture) -> None:
    mathematics = pytest.importorskip("docs_site.mathematics", reason="needs latex2mathml: run `make venv`")
    page = r'<p>a <span class="arithmatex">\(x &lt; \log p\)</span></p>'
    page += r'<div class="arithmatex">\[\Delta = \frac{a}{b} \tag{1}\]</div>'
    found = mathematics.with_mathml(page, "page.md")
    assert found.count("<math") == 2 and "arithmatex" not in found
    assert "&#x0003C;" in found and "<mi>log</mi><mo>&#x2061;</mo>" in found
    assert "<mfrac>" in found and "<span>(1)</span>" in found and 'display="block"' in found
    broken = r'<span class="arithmatex">\(a_b_c\)</span>'
    with caplog.at_level(logging.WARNING):
        assert mathematics.with_mathml(broken, "page.md") == broken
        mathematics.with_mathml(r'<span class="arithmatex">\(\nothing a\)</span>', "other.md")
    assert "page.md: the formula 'a_b_c' cannot be read" in caplog.text
    assert r"other.md: '\nothing' is not known in the formula" in caplog.text
