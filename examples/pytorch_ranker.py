"""From a PyTorch module with two outputs to a bundle: `python examples/pytorch_ranker.py [DIRECTORY]`.

A click and a purchase are predicted by a cross network with a head for each. Each output has its label and
its budget, and a plan must be inside both. Needs `loka-onnx[cpu,export]`; takes half a minute on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import nn

import loka_onnx
from loka_onnx.config import build_run_config

ITEMS, COUNTRIES, NUMBERS, WIDTH = 400, 12, 8, 16
ROWS, TRAIN = 240_000, 120_000


class Ranker(nn.Module):
    """Two cross layers over numbers and embeddings, a shared MLP, one head for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.countries = nn.Embedding(ITEMS, WIDTH), nn.Embedding(COUNTRIES, WIDTH)
        self.bottom = nn.Linear(NUMBERS, WIDTH)
        self.crosses = nn.ModuleList(nn.Linear(3 * WIDTH, 3 * WIDTH) for _ in range(2))
        self.shared = nn.Sequential(nn.Linear(3 * WIDTH, 64), nn.ReLU())
        self.click, self.purchase = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(
        self, numbers: torch.Tensor, item: torch.Tensor, country: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of a click and of a purchase, (rows,) each."""
        x0 = torch.cat([self.bottom(numbers), self.items(item), self.countries(country)], dim=1)
        x = x0
        for cross in self.crosses:
            x = x0 * cross(x) + x
        shared = self.shared(x)
        return self.click(shared).squeeze(1), self.purchase(shared).squeeze(1)


def build() -> tuple[nn.Module, dict[str, np.ndarray]]:
    """What the run file names: the module, and example rows that tell names, types and widths."""
    ids = np.zeros(2, np.int64)
    return Ranker(), {"numbers": np.zeros((2, NUMBERS), np.float32), "item": ids, "country": ids}


def make_rows() -> dict[str, np.ndarray]:
    """Features, and labels that depend on them."""
    rng = np.random.default_rng(0)
    item, country = rng.integers(0, ITEMS, ROWS), rng.integers(0, COUNTRIES, ROWS)
    numbers = rng.standard_normal((ROWS, NUMBERS)).astype(np.float32)
    taste = rng.standard_normal((2, ITEMS, NUMBERS)) / 2
    chances = [1 / (1 + np.exp(1 - (of[item] * numbers).sum(axis=1))) for of in taste]
    labels = [(rng.random(ROWS) < chance).astype(np.float32) for chance in chances]
    return {"numbers": numbers, "item": item, "country": country, "clicked": labels[0], "bought": labels[1]}


def train(ranker: Ranker, rows: dict[str, np.ndarray], steps: int = 400) -> None:
    """Logistic loss on both outputs, on the first rows."""
    torch.manual_seed(0)
    tensors = {name: torch.from_numpy(values) for name, values in rows.items()}
    optimizer = torch.optim.Adam(ranker.parameters(), lr=0.004)
    for _ in range(steps):
        at = torch.randint(0, TRAIN, (1024,))
        logits = ranker(*(tensors[name][at] for name in ("numbers", "item", "country")))
        loss = sum(
            nn.functional.binary_cross_entropy_with_logits(logit, tensors[label][at])
            for logit, label in zip(logits, ("clicked", "bought"), strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def write_clicks(rows: dict[str, np.ndarray], path: Path) -> None:
    """The rows that training has not seen, one column for each number."""
    columns = {name: values[TRAIN:] for name, values in rows.items() if name != "numbers"}
    columns |= {f"number_{n}": rows["numbers"][TRAIN:, n] for n in range(NUMBERS)}
    pq.write_table(pa.table(columns), path)


def main(directory: Path) -> None:
    """Train, run the pipeline, say what it decided, score a few rows with the bundle."""
    directory.mkdir(parents=True, exist_ok=True)
    rows, ranker = make_rows(), Ranker()
    train(ranker, rows)
    save_file(ranker.state_dict(), directory / "ranker.safetensors")
    write_clicks(rows, directory / "clicks.parquet")

    sys.path.insert(0, str(Path(__file__).parent))  # where `pytorch_ranker:build` is found
    config = build_run_config(
        {
            "model": {"torch": "pytorch_ranker:build", "checkpoint": "ranker.safetensors"},
            "outputs": [  # in the order in which forward() returns them
                {"name": "ctr", "kind": "logit", "label": "clicked", "budget": 0.001},
                {"name": "cvr", "kind": "logit", "label": "bought", "budget": 0.001},
            ],
            "data": {
                "path": "clicks.parquet",
                "split": {"by": "order"},
                "slices": ["country"],
                "synthetic": True,
                "inputs": {"numbers": [f"number_{n}" for n in range(NUMBERS)]},
            },
            "batch": {"serve": [64, 512]},
            "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
        },
        directory,
    )
    result = loka_onnx.run(config, loka_onnx.RunOptions(force=True))  # starts over where it ran before
    for target in result.choice.targets:
        print(f"{target.target}: plan {target.plan}, {target.reason}")
    for evaluation in result.report.evaluations.evaluations:
        if evaluation.split == "certification" and evaluation.plan.startswith(("fp8", "int8")):
            for output in evaluation.outputs:
                change = output.difference.judged
                print(
                    f"{evaluation.plan}, {output.output}: ΔNE {change.value:+.3%} "
                    f"[{change.lower:+.3%}, {change.upper:+.3%}], {output.budget_status}"
                )
    with loka_onnx.load(result.bundle) as engine:
        request = {name: rows[name][-3:] for name in ("numbers", "item", "country")}
        for name, logits in engine.infer(request).items():
            print(name, np.array2string(logits, precision=2))
    print(f"report {result.directory / 'report.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/pytorch"))
    main(parser.parse_args().directory)
