"""A small run: an ONNX ranker with three outputs, rows with learnable labels, and the run file for both."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from onnx_text import parsed

from loka_onnx.cli.main import main

ITEMS, WIDTH, HIDDEN, ROWS = 40, 16, 32, 6000
BIN = Path(sys.executable).parent


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "table": random.standard_normal((ITEMS, WIDTH)).astype(np.float32) / 2,
        "fc1.w": random.standard_normal((2 * WIDTH, HIDDEN)).astype(np.float32) / 5,
        "fc1.b": random.standard_normal(HIDDEN).astype(np.float32) / 10,
        "fc2.w": random.standard_normal((HIDDEN, HIDDEN)).astype(np.float32) / 5,
        "heads.w": random.standard_normal((HIDDEN, 3)).astype(np.float32) / 3,
        "heads.b": np.array([-1.0, -1.5, 0.5], np.float32),
    }


def scores(dense: np.ndarray, item: np.ndarray) -> np.ndarray:
    """(rows, 3) in float64: the two logits and the regression."""
    w = {name: value.astype(np.float64) for name, value in weights().items()}
    joined = np.concatenate([dense.astype(np.float64), w["table"][item]], axis=1)
    hidden = np.maximum(joined @ w["fc1.w"] + w["fc1.b"], 0)
    return np.maximum(hidden @ w["fc2.w"], 0) @ w["heads.w"] + w["heads.b"]


def write_ranker(path: Path, *, opset: int = 21) -> None:
    """dense (B, 16) and item (B,) → ctr (logit), cvr (probability) and spend (regression), each (B,)."""
    model = parsed(
        f"""["table/gather"] looked_up = Gather(table, item)
        [concat] joined = Concat<axis=1>(dense, looked_up)
        [fc1] h1 = Gemm(joined, "fc1.w", "fc1.b")
        [relu1] a1 = Relu(h1)
        [fc2] h2 = MatMul(a1, "fc2.w")
        [relu2] a2 = Relu(h2)
        [heads] scores = Gemm(a2, "heads.w", "heads.b")
        [split] s0, s1, s2 = Split<axis=1{", num_outputs=3" if opset >= 18 else ""}>(scores)
        [squeeze0] ctr = Squeeze(s0, one)
        [squeeze1] cvr_logit = Squeeze(s1, one)
        [sigmoid] cvr = Sigmoid(cvr_logit)
        [squeeze2] spend = Squeeze(s2, one)""",
        weights() | {"one": np.array([1])},
        inputs=f"float[batch,{WIDTH}] dense, int64[batch] item",
        outputs="float[batch] ctr, float[batch] cvr, float[batch] spend",
        opset=opset,
    )
    onnx.save(model, path)


def make_columns(rows: int = ROWS, seed: int = 1) -> dict[str, np.ndarray]:
    """Inputs, labels drawn from the ranker's own float64 answers, weights and request ids."""
    random = np.random.default_rng(seed)
    dense = random.standard_normal((rows, WIDTH)).astype(np.float32)
    item = random.integers(0, ITEMS, rows)
    answers = scores(dense, item)
    clicked, bought = (random.random((rows, 2)) < 1 / (1 + np.exp(-answers[:, :2]))).T
    return {
        **{f"d{i}": dense[:, i] for i in range(WIDTH)},
        "item_id": item,
        "request": np.arange(rows) // 4,
        "clicked": clicked.astype(np.float32),
        "bought": bought.astype(np.float32),
        "amount": (answers[:, 2] + random.standard_normal(rows)).astype(np.float32),
        "importance": random.uniform(0.5, 2.0, rows).astype(np.float32),
    }


def write_rows(path: Path, columns: Mapping[str, Any]) -> None:
    pq.write_table(pa.table(dict(columns)), path)


RUN_VALUES: dict[str, Any] = {
    "model": {"onnx": "ranker.onnx"},
    "outputs": [
        {"name": "ctr", "kind": "logit", "label": "clicked", "weight": "importance", "budget": 0.01},
        {"name": "cvr", "kind": "probability", "label": "bought", "budget": 0.01},
        {"name": "spend", "kind": "regression", "label": "amount", "budget": 0.01},
    ],
    "data": {
        "path": "rows.parquet",
        "split": {"by": "hash", "column": "request"},
        "group": "request",
        "synthetic": True,
        "inputs": {"dense": [f"d{i}" for i in range(WIDTH)], "item": "item_id"},
    },
    "batch": {"min": 1, "serve": [8, 64], "max": 256},
    "plan": {"plans": ["fp32", "fp8-all", "fp8-safe"]},
    "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
    "threads": 1,
}


@dataclass(frozen=True)
class Workplace:
    """A directory with a ranker, its rows and a run file."""

    path: Path

    @property
    def run_file(self) -> Path:
        return self.path / "RUN.yaml"

    @property
    def output(self) -> Path:
        return self.path / "runs" / "RUN"

    def write_run_file(self, **changes: Any) -> Path:
        """The run file with top-level keys replaced, or merged where both are mappings; None removes."""
        values = dict(RUN_VALUES)
        for key, change in changes.items():
            merged = {**values.get(key, {}), **change} if isinstance(change, dict) else change
            if isinstance(merged, dict):
                merged = {k: v for k, v in merged.items() if v is not None}
            values[key] = merged
        self.run_file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return self.run_file


def make_workplace(path: Path) -> Workplace:
    path.mkdir(parents=True, exist_ok=True)
    place = Workplace(path)
    write_ranker(path / "ranker.onnx")
    write_rows(path / "rows.parquet", make_columns())
    place.write_run_file()
    return place


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]
"""Runs the command in this process."""


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    """Run the command in this process."""
    capsys.readouterr()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGTERM, handler)
    captured = capsys.readouterr()
    return Done(int(ended.value.code or 0), captured.out, captured.err)


def start(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Run the command in a process of its own."""
    return subprocess.Popen(
        [BIN / "loka-onnx", *(str(argument) for argument in arguments)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 300) -> Done:
    out, err = process.communicate(timeout=seconds)
    return Done(process.returncode, out, err)


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a directory with its content, directories as empty ones."""
    return {
        entry.relative_to(path).as_posix(): entry.read_bytes() if entry.is_file() else b""
        for entry in sorted(path.rglob("*"))
    }
