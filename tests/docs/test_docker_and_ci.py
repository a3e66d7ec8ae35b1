"""Dockerfiles keep rules of hadolint and name what exists; the gate of the action fails when it should."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from synthetic_runs import call

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "examples" / "github-action"
DOCKERFILES = sorted((ROOT / "examples" / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments; lines that go on are joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    split = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word, rest) for word, rest in split]


def broken_rules(text: str) -> set[str]:
    """Rules, by hadolint's names where it has one, that a Dockerfile breaks."""
    found = instructions(text)
    runs = [rest for word, rest in found if word == "RUN"]
    last = dict(found)
    installs = [run for run in runs if "apt-get install" in run]
    rules = {
        "DL3006": not re.fullmatch(r"\S+:\d[\w.-]*", last["FROM"]),
        "DL3002": last.get("USER", "root") == "root",
        "DL3009": any("rm -rf /var/lib/apt/lists" not in run for run in installs),
        "DL3015": any("--no-install-recommends" not in run for run in installs),
        "DL3014": any(" -y" not in run for run in installs),
        "DL3042": any("pip install" in run and "--no-cache-dir" not in run for run in runs),
        "DL3020": "ADD" in last,
        "DL3025": any(not _is_list(last[word]) for word in ("ENTRYPOINT", "CMD") if word in last),
        "DL3000": any(word == "WORKDIR" and not rest.startswith("/") for word, rest in found),
        "order": found[0][0] != "FROM" or list(last).index("USER") > list(last).index("ENTRYPOINT"),
    }
    return {rule for rule, broken in rules.items() if broken}


def _is_list(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_keeps_the_rules_and_names_what_exists(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = path.read_text(encoding="utf-8")
    assert not broken_rules(text)
    assert "not built" in text, "nobody has"
    (extras,) = re.findall(r"none-any\.whl\[([\w,-]+)\]", text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert set(re.findall(r"loka_onnx-([\d.]+)-py3", text)) == {PROJECT["version"]}
    words = json.loads(dict(instructions(text))["ENTRYPOINT"])
    assert words[0] in PROJECT["scripts"]
    verb = [word for word in words[1:] if word.isalpha()]
    shown = call(capsys, *verb, "--help")
    assert shown.code == 0
    assert all(option in shown.out for option in words if option.startswith("--"))


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("FROM python:3.12-slim-trixie", "FROM python", "DL3006"),
        ("FROM python:3.12-slim-trixie", "FROM python:latest", "DL3006"),
        ("USER 10001", "USER root", "DL3002"),
        (" --no-cache-dir", "", "DL3042"),
        ("COPY", "ADD", "DL3020"),
        ('ENTRYPOINT ["loka-onnx", ', "ENTRYPOINT loka-onnx [", "DL3025"),
        ("USER 10001", "RUN apt-get update && apt-get install -y curl\nUSER 10001", "DL3009"),
    ],
)
def test_a_dockerfile_that_breaks_a_rule_is_noticed(old: str, new: str, rule: str) -> None:
    text = (ROOT / "examples/docker/serve.Dockerfile").read_text(encoding="utf-8")
    assert text.count(old) == 1
    assert rule in broken_rules(text.replace(old, new))


# The action -----------------------------------------------------------------------------------------------


def test_the_action_gives_its_script_all_that_it_reads() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    read = set(re.findall(r"\$\{?([A-Z_]+)", (ACTION / "gate.sh").read_text(encoding="utf-8")))
    assert read - {"GITHUB_STEP_SUMMARY"} == step["env"].keys()
    given = {re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1] for value in step["env"].values()}  # type: ignore[index]
    assert given == action["inputs"].keys()
    workflow = yaml.safe_load((ACTION / "workflow.yml").read_text(encoding="utf-8"))
    (used,) = [s for s in workflow["jobs"]["gate"]["steps"] if "gate" in s.get("uses", "")]
    assert used["with"].keys() <= action["inputs"].keys()


def write_model(path: Path, weight: float) -> Path:
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 2] x) => (float[n, 1] ctr) <float[2, 1] w = {{{weight}, -1.0}}> {{ ctr = MatMul(x, w) }}
    """
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "data", "code", "says"),
    [
        (1.0, "rows.parquet", 0, "inside the budget"),
        (3.0, "rows.parquet", 3, "not certain"),
        (1.0, "missing.parquet", 2, "could not be judged"),
    ],
)
def test_the_gate_passes_and_fails(tmp_path: Path, weight: float, data: str, code: int, says: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((4000, 2)).astype(np.float32)
    clicked = (draw.random(4000) < 1 / (1 + np.exp(x[:, 1] - x[:, 0]))).astype(np.float32)
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "clicked": clicked}), tmp_path / "rows.parquet")
    command = tmp_path / "bin" / "loka-onnx"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -P -c "from loka_onnx.cli.main import main; main()" "$@"\n',
        encoding="utf-8",
    )
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "DEPLOYED": str(write_model(tmp_path / "deployed.onnx", 1.0)),
        "CANDIDATE": str(write_model(tmp_path / "candidate.onnx", weight)),
        "DATA": data,
        "BUDGET": "0.001",
        "OPTIONS": "--no-latency --output ctr=logit --label ctr=clicked --inputs x=a,b",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    done = subprocess.run(
        ["bash", ACTION / "gate.sh"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert says in (tmp_path / "summary.md").read_text(encoding="utf-8")
