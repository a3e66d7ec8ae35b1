"""The shape mods on what PyTorch's two exporters write: every mod finds its pattern in both forms."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from rewrite_models import Arrays, as_double, evaluate

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.torch_module import export_torch
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.sequence import apply_mods
from loka_zoo import FeatureSpec, create

torch = pytest.importorskip("torch", reason="needs torch")
nn = torch.nn

FEATURES = FeatureSpec(tuple((f"c{i}", 20 + i) for i in range(6)), tuple(f"n{i}" for i in range(5)))
LOGIT = (OutputSpec("logit", OutputKind.LOGIT, "label"),)
EXPORTERS = ("dynamo", "torchscript")


class Forms(nn.Module):
    """What the zoo does not have: experts and gates, an Einsum, X·Xᵀ·Y, odd widths, a learned row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20 + i, 8) for i in range(6))
        self.experts = nn.ModuleList(nn.Linear(48, 20) for _ in range(3))
        self.gate = nn.Linear(48, 3)
        self.project = nn.Parameter(torch.randn(160, 4) / 12)
        self.bilinear = nn.Parameter(torch.randn(8, 5) / 3)
        self.widen = nn.Linear(20, 160 * 48)
        self.row = nn.Parameter(torch.randn(1, 6))
        self.head = nn.Linear(160 * 4 + 6 * 5 + 6 + 5, 1)
        with torch.no_grad():
            # Their product becomes a constant: exact in FP32, so that it is in float64.
            self.row.mul_(8).round_().div_(8)
            self.head.weight.mul_(64).round_().div_(64)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        embedded = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        flat = embedded.flatten(1)
        gates = torch.softmax(self.gate(flat), dim=1)
        mixed = sum(gates[:, i : i + 1] * torch.relu(expert(flat)) for i, expert in enumerate(self.experts))
        tokens = self.widen(mixed).reshape(-1, 160, 48)
        interaction = torch.matmul(torch.matmul(tokens, tokens.transpose(1, 2)), self.project)
        bilinear = torch.einsum("bnd,de->bne", embedded, self.bilinear)
        row = self.row.expand(dense.shape[0], -1)
        joined = torch.cat([interaction.flatten(1), bilinear.flatten(1), row, dense], dim=1)
        return self.head(joined).squeeze(-1)


def rows(batch: int = 32) -> Arrays:
    random = np.random.default_rng(0)
    return {
        "dense": random.normal(size=(batch, 5)).astype(np.float32),
        "ids": random.integers(0, 20, size=(batch, 6)),
    }


def export(module: nn.Module, exporter: str, folder: Path) -> ModelArtifact:
    target = folder / "model.onnx"
    if exporter == "dynamo":
        return export_torch(module.eval(), rows(), target, LOGIT)
    names: Any = {"input_names": list(rows()), "output_names": ["logit"]}
    names["dynamic_axes"] = {name: {0: "batch"} for name in ("dense", "ids", "logit")}
    tensors = tuple(torch.from_numpy(array) for array in rows().values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = str(folder / "raw.onnx")
        torch.onnx.export(module.eval(), tensors, raw, dynamo=False, opset_version=17, **names)
    return import_onnx(folder / "raw.onnx", target, LOGIT)


def rewritten(module, exporter, folder):
    source = export(module, exporter, folder)
    result = apply_mods(source, [rows()], folder / "after.onnx")
    assert [r.transform for r in result.log.records if r.rolled_back] == []
    before, after = onnx.load(source.path), onnx.load(result.model.path)
    onnx.checker.check_model(after, full_check=True)
    wide = {name: v.astype(np.float64) if v.dtype == np.float32 else v for name, v in rows(7).items()}
    expected = evaluate(as_double(before), wide)["logit"]
    np.testing.assert_allclose(evaluate(as_double(after), wide)["logit"], expected, rtol=0, atol=1e-9)
    found = OnnxSession(result.model.path).run(rows(7))["logit"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * max(1.0, float(np.abs(expected).max())))
    return source, result.model, result.log


@pytest.mark.slow
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_mod_finds_its_pattern(exporter, tmp_path):
    torch.manual_seed(0)
    _, model, log = rewritten(Forms(), exporter, tmp_path)
    applied = {record.transform for record in log.records if record.applied}
    assert applied >= {"einsum-to-matmul", "split-concat", "reassociate-interaction", "merge-gathers"}
    assert applied >= {"merge-parallel-linears", "join-parts", "pad-sites"}
    merged = [site for site in model.sites if site.merged_from]
    assert [len(site.merged_from) for site in merged] == [3]
    # 3 experts of 20, whose Relu comes first, and one more part of the Split; the gate's Softmax is no Relu.
    assert (merged[0].k, merged[0].n) == (48, 64)


MERGED = {
    "dlrm": [],
    "dcnv2": [],
    "wukong": [("layers.0.fmb.project", "layers.0.lcb.mix"), ("layers.1.fmb.project", "layers.1.lcb.mix")],
    "interformer": [("layers.0.cross_arch.pma.key", "layers.0.cross_arch.pma.value"),
        *[tuple(f"layers.0.sequence_arch.attention.{part}" for part in ("query", "key", "value"))],
        ("last.pma.key", "last.pma.value")],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MERGED)
def test_the_models_of_the_zoo(name, exporter, tmp_path):
    source, model, log = rewritten(create(name, FEATURES, "tiny"), exporter, tmp_path)
    assert {record.transform for record in log.records if record.applied} >= {"merge-gathers", "join-parts"}
    groups = [site.merged_from for site in model.sites if site.merged_from]
    for group in MERGED[name]:
        assert any(set(group) <= set(found) for found in groups), groups
    names = {site.name for site in model.sites} | {origin for group in groups for origin in group}
    assert {site.name for site in source.sites} <= names


class Bags(nn.Module):
    """Embedding bags of every mode, one with factors of its rows."""

    def __init__(self, paddings: tuple[int | None, ...]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(20, 4, mode=mode, padding_idx=padding)
            for mode in ("sum", "mean", "max")
            for padding in paddings
        )
        self.weighted = nn.EmbeddingBag(20, 4, mode="sum")
        self.head = nn.Linear(4 * len(self.bags) + 4, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bags = [bag(ids) for bag in self.bags]
        bags.append(self.weighted(ids[:, :5], per_sample_weights=dense))
        return self.head(torch.cat(bags, dim=1)).squeeze(-1)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_embedding_bags_need_no_loop(exporter, tmp_path):
    # The exporter by TorchScript refuses an id of padding.
    module = Bags((None, 5) if exporter == "dynamo" else (None,))
    source = export(module, exporter, tmp_path)
    result = apply_mods(source, [rows()], tmp_path / "after.onnx")
    assert not {"Loop", "SequenceInsert", "Range"} & {
        n.op_type for n in onnx.load(result.model.path).graph.node
    }
    for batch in (1, 7):
        given = rows(batch)
        # A bag without an id that counts.
        given["ids"][-1] = 5
        with torch.no_grad():
            expected = module(*map(torch.from_numpy, given.values())).numpy()
        found = OnnxSession(result.model.path).run(given)["logit"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
