"""Hostile run files, and runs whose numbers are as extreme as the schema lets them be."""

from pathlib import Path
from random import Random
from typing import Any

import yaml

from loka_onnx.config.loading import load_run_file
from loka_onnx.config.schema import RunConfig
from loka_onnx.pipeline.run import run
from tests.fuzz.values import changed, damaged, put

EXTREMES = (1, 2, 3, 1000000, 100000000, 1e300, 1e-300, 0.9999999999999999, 0.5000000000000001, 5e-324, 2**62)

TEXTS = (
    "a: &a [*a]\n",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n",
    "[" * 5000,
    "{" * 5000 + "}" * 5000,
    "model: !!python/object/apply:os.system ['true']\n",
    "? [a, b]\n: c\n",
    "a: 1\na: 2\n",
    "- 1\n- 2\n",
    "2024-01-01\n",
    "a: 0x" + "f" * 5000 + "\n",
    "a: " + "9" * 5000 + "\n",
    "\0",
    "%YAML 9.9\n---\n",
    "--- 1\n--- 2\n",
    "a: 1:2:3:4\n",
    "name: .nan\n",
    "a: !!timestamp 2024-99-99\n",
    "a: !!binary '=='\n",
    "<<: [1]\n",
)


def attempt(random: Random, place: Path) -> None:
    """Write a run file, and read it."""
    path = place / "RUN.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if random.random() < 0.5:
        # Every key, not only those that a run file has as a rule.
        values = load_run_file(path).model_dump(mode="json")
    text = yaml.safe_dump(changed(random, values), sort_keys=False, allow_unicode=True)
    match random.randrange(10):
        case 0:
            path.write_bytes(damaged(random, text.encode("utf-8", "replace")))
        case 1:
            path.write_text(
                random.choice(TEXTS) + random.choice(("", text)), encoding="utf-8", errors="replace"
            )
        case _:
            path.write_text(text, encoding="utf-8", errors="replace")
    load_run_file(path, random.choice(({}, {}, {random.choice(("batch.max", "outputs.9.name", "", ".")): 1})))


def attempt_run(random: Random, place: Path) -> None:
    """Run with one number that is extreme."""
    path = place / "RUN.yaml"
    config: RunConfig = load_run_file(path)
    values = config.model_dump(mode="json")
    at = random.choice(_numbers(values))
    extreme: Any = random.choice(EXTREMES)
    put(values, at, extreme)
    values["name"], values["output"] = "RUN", str(place / "runs" / "extreme")
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    run(path)


NULLS = ("rows", "range_rows", "sensitivity_rows", "threads", "parallel", "error_precision")
"""Keys of numbers whose default is none."""


def _numbers(values: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(values, dict | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        return [found for key, inner in items for found in _numbers(inner, (*at, key))]
    is_number = isinstance(values, int | float) and not isinstance(values, bool)
    return [at] if is_number or (at and at[-1] in NULLS) else []
