"""From a TorchRec model to an engine that reads TorchRec's own pooled embeddings.

A KeyedJaggedTensor has no batch axis: `values` is as long as all bags together, and its operators export as
Loop and Sequence. So the model is exported behind a wrapper that takes bags as a table of ids, (rows,
features · longest bag), -1 where a bag is shorter, and pools them with Gather, Mul and ReduceSum. It computes
the same, which is checked at the end. `model.split_sparse` then cuts the graph at the pooled embeddings: the
engine takes those from wherever TorchRec has sharded its tables, and the bundle carries the lookup for
everybody else.

Needs torchrec 1.9.2 and fbgemm-gpu-cpu 1.8.0 beside `loka-onnx[cpu,export]`; `docs/how-to/examples.md` says
how to install them. `python examples/torchrec_model.py [DIRECTORY]` takes half a minute on two cores.
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
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

import loka_onnx

FEATURES = {"genre": 40, "clicked_items": 300, "country": 20}
"""Feature → rows of its table."""
LONGEST, NUMBERS, WIDTH = 5, 8, 16
ROWS, TRAIN = 240_000, 120_000


def make_dlrm() -> DLRM:
    """TorchRec's DLRM: a bottom MLP, sum-pooled embeddings, dot products, a top MLP."""
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=WIDTH, num_embeddings=rows, feature_names=[name])
        for name, rows in FEATURES.items()
    ]
    return DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("cpu")),
        dense_in_features=NUMBERS,
        dense_arch_layer_sizes=[64, WIDTH],
        over_arch_layer_sizes=[128, 64, 1],
    )


class Bag(nn.Module):
    """Sum of the rows of one table that a bag of ids names; its name becomes that of the cut tensor."""

    def __init__(self, table: nn.EmbeddingBag) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Pooled rows, (rows, WIDTH), of ids (rows, LONGEST), of which -1 stands for none."""
        there = (ids > -1).to(self.table.weight.dtype).unsqueeze(2)
        return (nn.functional.embedding(ids.clamp(min=0), self.table.weight) * there).sum(dim=1)


class PaddedBags(nn.Module):
    """A DLRM that takes bags as padded ids, made of the very modules of the one that was trained."""

    def __init__(self, dlrm: DLRM) -> None:
        super().__init__()
        tables = dlrm.sparse_arch.embedding_bag_collection.embedding_bags.values()
        self.pooled = nn.ModuleDict({name: Bag(table) for name, table in zip(FEATURES, tables, strict=True)})
        self.dense, self.interactions, self.over = dlrm.dense_arch, dlrm.inter_arch, dlrm.over_arch

    def forward(self, numbers: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        """Click logits, (rows,), of `numbers` (rows, NUMBERS) and `bags` (rows, features · LONGEST)."""
        ids = bags.split(LONGEST, dim=1)
        pooled = [bag(part) for bag, part in zip(self.pooled.values(), ids, strict=True)]
        mixed = self.interactions(self.dense(numbers), torch.stack(pooled, dim=1))
        return self.over(mixed).squeeze(1)


def build() -> tuple[nn.Module, dict[str, np.ndarray]]:
    """What the run file names: the module, and example rows that tell names, types and widths."""
    bags = np.zeros((2, len(FEATURES) * LONGEST), np.int64)
    return PaddedBags(make_dlrm()), {"numbers": np.zeros((2, NUMBERS), np.float32), "bags": bags}


def jagged(bags: np.ndarray) -> KeyedJaggedTensor:
    """Padded bags, (rows, features · LONGEST), as TorchRec takes them."""
    by_feature = bags.reshape(len(bags), len(FEATURES), LONGEST).transpose(1, 0, 2)
    there = by_feature >= 0
    return KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.from_numpy(by_feature[there]),
        lengths=torch.from_numpy(there.sum(axis=2).ravel()),
    )


def make_rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, padded bags and clicks that depend on both."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((ROWS, NUMBERS)).astype(np.float32)
    bags, score = [], numbers @ rng.standard_normal(NUMBERS) / 2 - 1
    for size in FEATURES.values():
        ids = rng.integers(0, size, (ROWS, LONGEST))
        there = np.arange(LONGEST) < rng.integers(0, LONGEST + 1, (ROWS, 1))
        taste = rng.standard_normal((size, NUMBERS)) / 3
        score = score + ((taste[ids] * there[:, :, None]).sum(axis=1) * numbers).sum(axis=1)
        bags.append(np.where(there, ids, -1))
    clicked = (rng.random(ROWS) < 1 / (1 + np.exp(-score))).astype(np.float32)
    return numbers, np.concatenate(bags, axis=1), clicked


def train(dlrm: DLRM, numbers: np.ndarray, bags: np.ndarray, clicked: np.ndarray, steps: int = 400) -> None:
    """A few hundred steps through TorchRec's own forward."""
    optimizer = torch.optim.Adam(dlrm.parameters(), lr=0.005)
    rng = np.random.default_rng(1)
    for _ in range(steps):
        drawn = rng.integers(0, TRAIN, 512)
        logits = dlrm(torch.from_numpy(numbers[drawn]), jagged(bags[drawn])).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(clicked[drawn]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def write_run_file(path: Path) -> None:
    """The run file, for rows whose columns are number_0 … and bag_0 …"""
    numbers = [f"number_{n}" for n in range(NUMBERS)]
    bags = [f"bag_{n}" for n in range(len(FEATURES) * LONGEST)]
    path.write_text(
        f"""\
model: {{torch: "torchrec_model:build", checkpoint: dlrm.safetensors, split_sparse: true}}
outputs: [{{name: ctr, kind: logit, label: clicked, budget: 0.001}}]
data:
  path: clicks.parquet
  split: {{by: order}}
  synthetic: true
  inputs: {{numbers: [{", ".join(numbers)}], bags: [{", ".join(bags)}]}}
batch: {{min: 1, serve: [64, 512], max: 4096}}
plan: {{formats: [fp8]}}  # a CPU judges it and runs FP32, to compare with TorchRec; by default INT8 competes
targets: [{{device: cpu, backends: [onnxruntime]}}]
""",
        encoding="utf-8",
    )


def main(directory: Path) -> None:
    """Train, run the pipeline, and ask the dense engine with TorchRec's own pooled embeddings."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    numbers, bags, clicked = make_rows()
    dlrm = make_dlrm()
    train(dlrm, numbers, bags, clicked)
    dlrm.eval()
    save_file(PaddedBags(dlrm).state_dict(), directory / "dlrm.safetensors")

    new = slice(TRAIN, None)  # rows that training has not seen
    columns = {f"number_{n}": numbers[new, n] for n in range(NUMBERS)}
    columns |= {f"bag_{n}": bags[new, n] for n in range(bags.shape[1])}
    pq.write_table(pa.table({**columns, "clicked": clicked[new]}), directory / "clicks.parquet")
    write_run_file(directory / "RUN.yaml")
    sys.path.insert(0, str(Path(__file__).parent))  # where the run file's `torchrec_model:build` is found

    # Starts over where it ran before.
    result = loka_onnx.run(directory / "RUN.yaml", loka_onnx.RunOptions(force=True))
    for target in result.choice.targets:
        print(f"{target.target}: plan {target.plan}, {target.reason}")
    for evaluation in result.report.evaluations.evaluations:
        if evaluation.split == "certification" and evaluation.plan.startswith("fp8"):
            change = evaluation.outputs[0].difference.judged
            print(f"{evaluation.plan}: ΔNE {change.value:+.3%} [{change.lower:+.3%}, {change.upper:+.3%}]")

    with loka_onnx.load(result.bundle, part="dense") as engine, torch.no_grad():
        names = [tensor.name for tensor in engine.inputs]
        print("the dense engine reads", ", ".join(names))
        kjt = jagged(bags[new][:512])
        pooled = dlrm.sparse_arch(kjt).numpy()  # (rows, features, WIDTH): a sharded collection in production
        request = {"numbers": numbers[new][:512]}
        request |= {name: pooled[:, at] for at, name in enumerate(names[1:])}
        expected = dlrm(torch.from_numpy(request["numbers"]), kjt).squeeze(1).numpy()
        difference = np.abs(engine.infer(request)["ctr"] - expected).max()
        print(f"largest difference from TorchRec's own answer on 512 rows: {difference:.2g}")
    print(f"report {result.directory / 'report.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/torchrec"))
    main(parser.parse_args().directory)
