"""The example of the README, executed exactly as it is printed, in an empty directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from loka_onnx import config as sections
from loka_onnx.config import OutputConfig, PlanConfig, RunConfig, load_run_file
from loka_onnx.core import serde
from loka_onnx.report import ReportData
from loka_onnx.sessions.host_devices import integer_instructions

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LAYOUT = ROOT / "docs" / "reference" / "run-directory.md"
sys.path.insert(0, os.fspath(ROOT))

from docs_site.code_blocks import Block, blocks_of, commands_of  # noqa: E402
from docs_site.page_runner import PageRunner  # noqa: E402


def is_made(block: Block) -> bool:
    """Whether it is of `make`: `make demo` has a test of its own, `make test` is running."""
    return block.language == "console" and all(each.text.startswith("make ") for each in commands_of(block))


@pytest.mark.slow
def test_the_example_runs_as_printed(tmp_path):
    with PageRunner(tmp_path) as runner:
        printed = [runner.run(block) for block in blocks_of(README) if block.is_run and not is_made(block)]
    for name in ("report.html", "report.md", "report.json", "run.json", "bundle/manifest.json"):
        assert (tmp_path / "runs" / "RUN" / name).is_file()
    assert "SYNTHETIC DATA" in "".join(printed)
    line = printed[-1].splitlines()[-1]
    assert re.fullmatch(
        r"cpu-onnxruntime-cpu-(fp32|int8-all|int8-safe|refined-\d+) \[-?\d\S* +-?\d\S* *\]", line
    )
    report = serde.read(ReportData, tmp_path / "runs" / "RUN" / "report.json")
    inside = {
        plan: (e := report.evaluation(f"cpu-onnxruntime-cpu-{plan}", "certification")) and e.is_within_budget
        for plan in ("fp32", "fp8-all", "fp8-safe", "int8-all", "int8-safe")
    }
    is_certain = {"int8-safe": True} if integer_instructions() else {"fp8-all": False, "fp8-safe": True}
    # Of INT8 everywhere the README says nothing.
    said = {plan: judged for plan, judged in inside.items() if judged is not None and plan != "int8-all"}
    assert said == {"fp32": True, **is_certain}, "what the README says of it"


def test_the_way_to_the_demo_is_the_one_that_the_release_is_tested_by():
    """`tests/release.sh` takes its commands out of docs/index.md; the README has the same ones."""
    from loka_zoo import movielens100k

    index = ROOT / "docs" / "index.md"
    script = (ROOT / "tests" / "release.sh").read_text(encoding="utf-8")
    (extraction,) = re.findall(r"^commands=\$\((sed .*) \"\$root/docs/index\.md\"\)$", script, re.M)
    taken = subprocess.run(
        ["bash", "-c", f"{extraction} '{index}'"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for page in (README, index):
        (block,) = [each for each in blocks_of(page) if "release.sh" in (each.reason_not_to_run or "")]
        assert [command.text for command in commands_of(block)] == taken, page.name
    assert taken[0] == "pip install 'loka-onnx[cpu,export]'" and taken[-1] == "loka-onnx demo"
    remedies = re.findall(r'remedy="(pip install [^"]*)"', Path(movielens100k.__file__).read_text("utf-8"))
    assert set(remedies) == set(taken[1:-1]), "what the demo asks for where it is missing"


def test_commands_that_are_named_exist():
    text = README.read_text(encoding="utf-8")
    from typer.main import get_command

    from loka_onnx.cli.main import app

    verbs = set(getattr(get_command(app), "commands", {}))
    named = set(re.findall(r"loka-onnx ([a-z]+)", text))
    assert named <= verbs and {"run", "doctor", "demo", "bundle"} <= named
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"\bmake (\w+)", text))
    assert {"demo", "docs"} <= targets
    for target in targets:
        assert f"\n{target}:" in makefile


def test_the_page_of_the_run_directory_names_all_that_a_run_leaves():
    from loka_onnx.pipeline.directory import OWNED

    rows = LAYOUT.read_text(encoding="utf-8").partition("\n## ")[0]
    for name in OWNED:
        assert f"`{name}" in rows, f"the layout lacks {name}"
    assert LAYOUT.relative_to(ROOT).as_posix() in README.read_text(encoding="utf-8")


def test_links_lead_to_what_is_in_the_repository():
    """Pages that the site generates are not there; the results and the command line among them."""
    links = re.findall(r"\]\(([^)\s]+)\)", README.read_text(encoding="utf-8"))
    assert {"docs/tutorial/index.md", "docs/reference/index.md"} <= set(links)
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), f"{link} leads nowhere"
        assert not anchor or anchor in _anchors(ROOT / path), f"{path} has no heading #{anchor}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_extras_are_those_of_the_package():
    import tomllib

    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    listed = re.findall(r"^\| `([a-z-]+)` \|", README.read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(project["optional-dependencies"])


def test_the_annotated_run_file_names_every_key_with_its_default(tmp_path):
    text = (README.parent / "examples" / "every-key.yaml").read_text(encoding="utf-8")
    (tmp_path / "every-key.yaml").write_text(text)
    for name in ("ranker.onnx", "day-07.parquet", "day-08.parquet", "day-09.parquet"):
        (tmp_path / name).touch()
    config = load_run_file(tmp_path / "every-key.yaml")
    for section in (f for f in vars(sections).values() if _is_section(f)):
        for key in section.model_fields:
            assert re.search(rf"\b{key}:", text), f"{section.__name__}.{key} is not in the example"
    for key in ("batch", "calibration", "build", "threads"):
        assert getattr(config, key) == RunConfig.model_fields[key].get_default(call_default_factory=True)
    default = PlanConfig()
    assert config.plan.model_copy(update={"keep": ()}) == default
    assert config.outputs[0].budget == OutputConfig.model_fields["budget"].default


def _is_section(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel) and bool(value.model_fields)
