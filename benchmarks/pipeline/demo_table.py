"""The demo's table as README.md shows it: runs `loka-onnx demo`, writes the page and a record of its numbers.

The record has the numbers as the run's documents have them, unrounded; `tests/docs/test_public_numbers.py`
holds every number that the page prints against them. Nothing of the data is kept but these figures.

    python -m benchmarks.pipeline.demo_table [--directory RUN]     # a finished demo is taken over
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.recording import write_record

README = Path(__file__).parents[2] / "README.md"
TARGET = "cpu"
QUANTIZED = ("fp8", "int8")
TABLE = re.compile(rf"^demo, {TARGET}: certification\n.*?^\* emitted$", re.S | re.M)
BLOCK = re.compile(r"(?<=^```text\n)demo, .*?(?=^```$)", re.S | re.M)


def main() -> None:
    """Run, record, and put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="the demo's run directory")
    given = parser.parse_args().directory
    with tempfile.TemporaryDirectory() as place:
        directory = given or Path(place) / "demo"
        command = [
            str(Path(sys.executable).with_name("loka-onnx")),
            "--quiet",
            "demo",
            "--output",
            str(directory),
        ]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        lines = "\n".join(line.rstrip() for line in printed.splitlines())
        table = TABLE.search(lines)
        if table is None:
            sys.exit(f"the demo printed no table of '{TARGET}':\n{printed}")
        figures = figures_of(directory)
    text, count = BLOCK.subn(lambda _: table[0] + "\n", README.read_text(encoding="utf-8"))
    assert count == 1, "README.md has one table of the demo"
    README.write_text(text, encoding="utf-8")
    print(write_record("demo_table", figures, {"command": "python -m benchmarks.pipeline.demo_table"}))


def figures_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Plan → every number that its row may show; those of shares and changes as fractions."""
    value = {
        name: json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))["value"]
        for name in ("evaluation", "engines", "plan")
    }
    plans = {plan["id"]: plan for plan in value["plan"]["plans"]}
    judged = {
        each["plan"]: each
        for each in value["evaluation"]["evaluations"]
        if each["split"] == "certification" and each["target"] == TARGET and each["engine"] != "reference"
    }
    rows: dict[str, dict[str, Any]] = {}
    for engine in value["engines"]["engines"]:
        if engine["target"] != TARGET:
            continue
        plan = plans[engine["plan"]]
        planned = [d["site"] for d in plan["decisions"] if d["precision"] in QUANTIZED]
        engaged = [site for site in engine["sites"] if site["planned"] in QUANTIZED and site["engaged"]]
        rows[plan["id"]] = {
            **(_accuracy(judged[plan["id"]]) if judged.get(plan["id"], {}).get("outputs") else {}),
            "planned_sites": len(planned),
            "engaged_sites": len(engaged),
            "fp8_share": plan["fp8_share"],
            "bytes": engine["bytes"],
            "p50_us": {
                str(x["batch"]): x["p50_us"]
                for x in judged.get(plan["id"], {}).get("latencies", ())
                if not engine["simulated"]
            },
        }
    return rows


def _accuracy(evaluation: Any) -> dict[str, Any]:
    (output,) = evaluation["outputs"]
    found = {"ne": output["metrics"]["normalized_entropy"], "auc": output["metrics"]["auc"]}
    for name, interval in (output["difference"] or {}).items():
        if isinstance(interval, dict) and {"value", "lower", "upper"} <= interval.keys():
            found |= {f"{name}_{end}": interval[end] for end in ("value", "lower", "upper")}
            widths = interval["upper"] - interval["value"], interval["value"] - interval["lower"]
            found[f"{name}_half_width"] = max(widths)
    return found


if __name__ == "__main__":
    main()
