"""Training learns, repeats, and refuses; checkpoints come back and cannot run code."""

import dataclasses
import pickle
import sys
import warnings

import numpy as np
import pytest

from loka_onnx.data import Dataset
from loka_onnx.errors import ConfigError, DataError, MissingPackage, ModelError
from loka_zoo import FeatureSpec, create
from loka_zoo.synthetic import LABEL, TEACHER, SyntheticOptions, prepare_synthetic

torch = pytest.importorskip("torch", reason="needs torch")

from loka_onnx.export.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from loka_zoo.training import TrainOptions, predict, train  # noqa: E402

OPTIONS = TrainOptions(epochs=4, batch_size=256, learning_rate=5e-3, threads=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    options = SyntheticOptions(rows=(12_000, 100, 100, 6_000))
    return prepare_synthetic(tmp_path_factory.mktemp("synthetic"), options)


def loss(logit: np.ndarray, label: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, logit) - label * logit))


def labels(dataset: Dataset, column: str = LABEL) -> np.ndarray:
    return np.concatenate([batch.columns[column] for batch in dataset.batches(4096)]).astype(np.float64)


@pytest.mark.parametrize(
    "name", ["dlrm", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dcnv2", "wukong", "interformer"))]
)
def test_a_model_comes_close_to_the_teacher(data, name):
    model = create(name, FeatureSpec.of(data), "tiny")
    seen = []
    result = train(model, data.open("train"), OPTIONS, lambda *step: seen.append(step))
    held_out = data.open("certification", (LABEL, TEACHER))
    label, teacher = labels(held_out), labels(held_out, TEACHER)
    base = label.mean()
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base))
    reachable = loss(teacher, label)
    got = loss(predict(model, held_out).astype(np.float64), label)
    # Most of the way from knowing nothing but the base rate to the teacher itself, on unseen rows.
    assert (entropy - got) / (entropy - reachable) > 0.8
    assert result.rows == 12_000 and result.losses == tuple(sorted(result.losses, reverse=True))
    assert [step for step, _, _ in seen] == list(range(1, 185)) and {total for _, total, _ in seen} == {184}
    assert not model.training


@pytest.mark.slow
def test_training_repeats_bit_by_bit(data):
    runs = []
    for seed in (0, 0, 1):
        model = create("wukong", FeatureSpec.of(data), "tiny")
        result = train(model, data.open("train"), dataclasses.replace(OPTIONS, epochs=1, seed=seed))
        runs.append((result.losses, model.head.weight))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


def test_what_cannot_be_trained_on_is_refused_and_divergence_is_an_error(data):
    model = create("dlrm", FeatureSpec.of(data), "tiny")
    with pytest.raises(ConfigError, match=r"its columns are \(\), the label is 'label'"):
        train(model, data.open("train", ()), OPTIONS)
    with pytest.raises(ConfigError, match="it has 100 rows, a batch 256"):
        train(model, data.open("selection"), OPTIONS)
    with pytest.raises(DataError, match=r"label 'teacher_logit' of 'train.parquet' is outside \[0, 1\]"):
        train(model, data.open("train", (TEACHER,)), dataclasses.replace(OPTIONS, label=TEACHER))
    with pytest.raises(ConfigError, match=r"training options are out of range(?s:.*)epochs 0"):
        TrainOptions(epochs=0)
    model = create("dlrm", FeatureSpec.of(data), "tiny")
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    with pytest.raises(ModelError, match=r"training diverged(?s:.*)loss of step 0 is nan(?s:.*)lower the"):
        train(model, data.open("train"), OPTIONS)


# ---- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_checkpoint_comes_back(tmp_path, name, data):
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    model = create("dcnv2", FeatureSpec.of(data), "tiny", seed=5)
    save_checkpoint(tmp_path / name, model.state_dict())
    loaded = load_checkpoint(tmp_path / name)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_weights_may_lie_one_level_down(tmp_path, key):
    torch.save({key: {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "c.pt")
    assert load_checkpoint(tmp_path / "c.pt").keys() == {"w"}


class Payload:
    """Unpickled without care, it creates a file."""

    def __init__(self, marker) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


def test_a_checkpoint_cannot_run_code(tmp_path):
    marker = tmp_path / "marker"
    torch.save({"w": Payload(marker)}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"w": Payload(marker)}, protocol=2))
    (tmp_path / "blocked.pt").write_bytes(b"\x80\x02cposix\nsystem\n.")
    refused = "Unsupported global: GLOBAL io.open was not an allowed global by default."
    found = {
        "evil.pt": refused,
        "plain.pt": refused,
        "blocked.pt": "Trying to load unsupported GLOBAL posix.system whose module posix is blocked.",
    }
    for name, evidence in found.items():
        with pytest.raises(ModelError) as caught:
            load_checkpoint(tmp_path / name)
        # What PyTorch found, and none of what it says on how to load the file all the same.
        assert str(caught.value) == (
            f"{tmp_path / name}: the checkpoint holds more than weights, or is broken; "
            f"loading it could run code\n  evidence: {evidence}\n"
            "  remedy: save the weights alone: torch.save(model.state_dict(), path), or a .safetensors file"
        )
    assert not marker.exists()


def test_a_script_archive_is_refused_without_advice_to_trust_it(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
        with pytest.raises(ModelError) as caught:
            load_checkpoint(tmp_path / "script.pt")
    assert caught.value.evidence.startswith("Cannot use ``weights_only=True`` with TorchScript archives")
    assert "Re-running" not in caught.value.evidence


@pytest.mark.parametrize("name", ["broken.pt", "broken.safetensors"])
@pytest.mark.parametrize("keep", [0, 20, 0.5])
def test_a_broken_checkpoint_is_refused(tmp_path, name, keep):
    path = tmp_path / name
    save_checkpoint(path, {"w": torch.ones(500)})
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(ModelError, match=r"cannot be read|or is broken"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "evidence"),
    [
        *(([1, 2], "it holds a list"), ({"epoch": 3}, "entry 'epoch' is no tensor"), ({}, "it is empty")),
        (torch.nn.Linear(2, 2), r"holds more than weights(?s:.*)save the weights alone"),
    ],
)
def test_what_is_no_table_of_weights_is_refused(tmp_path, content, evidence):
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(ModelError, match=evidence):
        load_checkpoint(tmp_path / "c.pt")


def test_missing_safetensors_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingPackage, match="pip install safetensors"):
        load_checkpoint(tmp_path / "a.safetensors")
