"""The example of the README, executed exactly as it is printed, in an empty directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel
from synthetic_runs import BIN

from loka_onnx import config as sections
from loka_onnx.config import OutputConfig, PlanConfig, RunConfig, load_run_file
from loka_onnx.core import serde
from loka_onnx.report import ReportData

README = Path(__file__).parents[2] / "README.md"
FENCE = re.compile(r"^```(?P<language>\w+)(?: file=(?P<file>\S+))?\n(?P<body>.*?)^```$", re.S | re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block: a file to write, or commands (lines after ``$ ``) and their output."""

    language: str
    file: str | None
    body: str

    @property
    def commands(self) -> list[str]:
        return [line[2:] for line in self.body.splitlines() if line.startswith("$ ")]


def blocks() -> list[Block]:
    found = FENCE.finditer(README.read_text(encoding="utf-8"))
    return [Block(match["language"], match["file"], match["body"]) for match in found]


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        command,
        shell=True,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    printed = []
    for block in blocks():
        if block.file is not None:
            (tmp_path / block.file).write_text(block.body, encoding="utf-8")
        elif block.language == "console":
            for command in block.commands:
                if command.startswith("make "):
                    continue  # `make demo` has a test of its own, `make test` is running
                done = shell(command, tmp_path)
                assert done.returncode == 0, (command, done.stderr)
                printed.append(done.stdout)
    for name in ("report.html", "report.md", "report.json", "run.json", "bundle/manifest.json"):
        assert (tmp_path / "runs" / "RUN" / name).is_file()
    assert "SYNTHETIC DATA" in "".join(printed)
    assert re.fullmatch(r"cpu-onnxruntime-cpu-fp32 \[-?\d\S* +-?\d\S*\]\n", printed[-1])
    report = serde.read(ReportData, tmp_path / "runs" / "RUN" / "report.json")
    inside = {
        plan: (e := report.evaluation(f"cpu-onnxruntime-cpu-{plan}", "certification")) and e.is_within_budget
        for plan in ("fp32", "fp8-all", "fp8-safe")
    }
    assert inside == {"fp32": True, "fp8-all": False, "fp8-safe": True}, "what the README says of it"


def test_commands_and_layout_that_are_named_exist() -> None:
    text = README.read_text(encoding="utf-8")
    from typer.main import get_command

    from loka_onnx.cli.main import app
    from loka_onnx.pipeline.directory import OWNED

    verbs = set(getattr(get_command(app), "commands", {}))
    named = set(re.findall(r"loka-onnx ([a-z]+)", text))
    assert named <= verbs and {"run", "doctor", "demo", "bundle"} <= named
    for name in OWNED:
        assert f"`{name}" in text, f"the layout lacks {name}"
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\w+)", text, re.M):
        assert f"\n{target}:" in makefile


def test_extras_are_those_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    listed = re.findall(r"^\| `([a-z-]+)` \|", README.read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(project["optional-dependencies"])


def test_the_annotated_run_file_names_every_key_with_its_default(tmp_path: Path) -> None:
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


def test_no_block_is_left_out() -> None:
    kinds = [(block.language, block.file) for block in blocks()]
    assert ("python", "make_ranker.py") in kinds and ("yaml", "RUN.yaml") in kinds
    assert all(language in {"python", "yaml", "console", "text"} for language, _ in kinds)
    assert shutil.which("loka-onnx", path=os.fspath(BIN))
