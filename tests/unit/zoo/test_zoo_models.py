"""The formulas of the models against plain NumPy, their sizes, names and export."""

import subprocess
import sys

import numpy as np
import pytest

from loka_onnx.data import InputBinding
from loka_onnx.errors import ConfigError
from loka_zoo import MODEL_NAMES, FeatureSpec, create
from loka_zoo.prepared import Part, PreparedData

torch = pytest.importorskip("torch", reason="needs torch")

FEATURES = FeatureSpec((("user_id", 50), ("genre1", 7), ("item_id", 40)), ("a", "b", "c", "d"))
HISTORY = FeatureSpec(FEATURES.categorical, FEATURES.numeric, history=("item_id", 5))
EVERY = [(name, FEATURES) for name in MODEL_NAMES] + [("interformer", HISTORY)]


def example(rows: int, features: FeatureSpec = FEATURES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = {
        "dense": torch.randn(rows, len(features.numeric), generator=generator),
        "ids": torch.stack(
            [torch.randint(0, n, (rows,), generator=generator) for _, n in features.categorical], dim=1
        ),
    }
    if features.history is not None:
        inputs["history"] = torch.randint(0, 40, (rows, features.history[1]), generator=generator)
    return inputs


def weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def relu_layers(w, prefix, x, depth, final=True):
    for n in range(1, depth + 1):
        x = x @ w[f"{prefix}.fc{n}.weight"].T + w[f"{prefix}.fc{n}.bias"]
        if n < depth or final:
            if f"{prefix}.norm{n}.weight" in w:
                x = layer_norm(x, w, f"{prefix}.norm{n}")
            x = np.maximum(x, 0)
    return x


def layer_norm(x, w, prefix):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w[f"{prefix}.weight"] + w[f"{prefix}.bias"]


def embed(w, inputs):
    ids = inputs["ids"].numpy()
    return [w[f"embeddings.{name}.weight"][ids[:, i]] for i, (name, _) in enumerate(FEATURES.categorical)]


def reference(name: str, w, inputs) -> np.ndarray:
    """Logits in float64, written from the papers' formulas with loops over pairs, layers and rows."""
    bottom = relu_layers(w, "bottom", inputs["dense"].double().numpy(), 2)
    tokens = [bottom, *embed(w, inputs)]
    if name == "dlrm":
        pairs = [(tokens[i] * tokens[j]).sum(-1) for i in range(len(tokens)) for j in range(i)]
        top = relu_layers(w, "over", np.column_stack([bottom, *pairs]), 2)
    elif name == "dcnv2":
        x0 = x = np.concatenate(tokens, axis=1)
        for layer in range(2):
            linear = f"cross.{layer}.linear"
            x = x0 * (x @ w[f"{linear}.weight"].T + w[f"{linear}.bias"]) + x
        top = relu_layers(w, "over", x, 2)
    else:
        rows = [wukong_layers(w, np.stack(row)) for row in zip(*tokens, strict=True)]
        top = relu_layers(w, "over", np.stack(rows), 1)
    return (top @ w["head.weight"].T + w["head.bias"])[:, 0]


def wukong_layers(w, x):
    for layer in range(2):
        p = f"layers.{layer}"
        y = w[f"{p}.fmb.project.weight"].T
        # X·Xᵀ·Y from the left, the order of products that the model avoids.
        flat = layer_norm((x @ x.T @ y).reshape(-1), w, f"{p}.fmb.norm")
        fmb = relu_layers(w, f"{p}.fmb.mlp", flat[None], 2, final=False).reshape(4, 8)
        lcb = w[f"{p}.lcb.mix.weight"] @ x
        mix = w.get(f"{p}.residual.mix.weight")
        x = layer_norm(np.concatenate([fmb, lcb]) + (x if mix is None else mix @ x), w, f"{p}.norm")
    return x.reshape(-1)


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "wukong"])
def test_logits_are_the_papers_formulas(name):
    model = create(name, FEATURES, "tiny", seed=3)
    inputs = example(6)
    with torch.no_grad():
        got = model(**inputs).double().numpy()
    # float32 against float64 over a few hundred terms of order 1.
    np.testing.assert_allclose(got, reference(name, weights(model), inputs), rtol=1e-4, atol=1e-6)


def test_low_rank_cross_is_the_full_one_with_the_product_matrix():
    from loka_zoo.layers import Cross

    torch.manual_seed(0)
    low, full = Cross(12, 3), Cross(12, None)
    with torch.no_grad():
        full.linear.weight.copy_(low.linear.up.weight @ low.linear.down.weight)
        full.linear.bias.copy_(low.linear.up.bias)
        x0, x = torch.randn(2, 5, 12)
        torch.testing.assert_close(low(x0, x), full(x0, x))


def test_attention_is_softmax_of_scaled_products():
    from loka_zoo.interformer import Attention

    torch.manual_seed(0)
    attention = Attention(8, 2)
    queries, tokens = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    with torch.no_grad():
        got = attention(queries, tokens).numpy()
        q, k, v = (
            layer(x).numpy()
            for layer, x in ((attention.query, queries), (attention.key, tokens), (attention.value, tokens))
        )
        for row in range(3):
            heads = []
            for part in (slice(0, 4), slice(4, 8)):
                scores = np.exp(q[row, :, part] @ k[row, :, part].T / 2.0)
                heads.append(scores / scores.sum(1, keepdims=True) @ v[row, :, part])
            want = attention.out(torch.from_numpy(np.concatenate(heads, axis=1))).numpy()
            np.testing.assert_allclose(got[row], want, rtol=1e-4, atol=1e-5)


def test_interformer_reads_its_history_or_the_named_fields():
    model = create("interformer", HISTORY, "tiny")
    inputs = example(4, HISTORY)
    with torch.no_grad():
        before = model(**inputs)
        inputs["history"] = (inputs["history"] + 1) % 40
        assert not torch.allclose(before, model(**inputs), atol=1e-6, rtol=0)
    features = FeatureSpec(FEATURES.categorical, FEATURES.numeric, ("genre1", "item_id"))
    model = create("interformer", features, "tiny")
    assert model.positions.shape == (1, 2, 8)


def test_seeds_of_pooling_begin_small():
    """Attention of a fresh model is nearly even over the sequence: no seed picks an event before training."""
    found = [p for name, p in create("interformer", FEATURES, "tiny").named_parameters() if "seeds" in name]
    assert found
    for seeds in found:
        assert 0 < torch.std(seeds) < 0.1


@pytest.mark.parametrize(("name", "features"), EVERY)
def test_rows_do_not_influence_one_another(name, features):
    model = create(name, features, "tiny")
    inputs = example(5, features)
    with torch.no_grad():
        whole = model(**inputs)
        single = torch.cat([model(**{k: v[i : i + 1] for k, v in inputs.items()}) for i in range(5)])
    assert whole.shape == (5,)
    torch.testing.assert_close(whole, single, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_model_with_a_history_exports_with_a_dynamic_batch():
    """The others are exported for tests of calibration (`zoo_runs`)."""
    runtime = pytest.importorskip("onnxruntime")
    model = create("interformer", HISTORY, "tiny")
    batch = torch.export.Dim("batch", min=1, max=65536)
    inputs = example(3, HISTORY)
    shapes = {key: {0: batch} for key in inputs}
    more = {"dynamo": True, "opset_version": 21, "dynamic_shapes": shapes, "verbose": False}
    proto = torch.onnx.export(model, (), kwargs=inputs, **more).model_proto
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == list(inputs)
    for rows in (1, 3, 130):
        inputs = example(rows, HISTORY)
        (got,) = session.run(None, {key: value.numpy() for key, value in inputs.items()})
        assert got.shape == (rows,)
        with torch.no_grad():
            np.testing.assert_allclose(got, model(**inputs).numpy(), rtol=1e-4, atol=1e-5)


def test_module_names_are_what_sites_will_be_called():
    names = {
        name: {n for n, m in create(name, FEATURES, "tiny").named_modules() if isinstance(m, torch.nn.Linear)}
        for name in MODEL_NAMES
    }
    assert names["dlrm"] == {"bottom.fc1", "bottom.fc2", "over.fc1", "over.fc2", "head"}
    assert {"cross.0.linear", "cross.1.linear", "over.fc1", "head"} <= names["dcnv2"]
    assert {"layers.0.fmb.project", "layers.0.fmb.mlp.fc1", "layers.0.lcb.mix", "layers.0.residual.mix"} <= (
        names["wukong"]
    )
    # Eight tokens stay eight: the second layer's residual is the identity.
    assert "layers.1.residual.mix" not in names["wukong"]


@pytest.mark.parametrize(
    # 27 vectors of 128 are concatenated, or have 351 pairs.
    ("name", "interaction"),
    [("dcnv2", 27 * 128), ("dlrm", 128 + 351)],
)
def test_production_models_have_the_sizes_of_mlperf(name, interaction):
    features = FeatureSpec(tuple((f"c{i}", 2) for i in range(26)), tuple(f"i{i}" for i in range(13)))
    shapes = {n: tuple(p.shape) for n, p in create(name, features, "production").named_parameters()}
    assert [shapes[f"bottom.fc{i}.weight"] for i in (1, 2, 3)] == [(512, 13), (256, 512), (128, 256)]
    crosses = {shape for n, shape in shapes.items() if n.startswith("cross.") and len(shape) == 2}
    assert crosses == ({(512, 3456), (3456, 512)} if name == "dcnv2" else set())
    top = [shapes[f"over.fc{i}.weight"] for i in (1, 2, 3, 4)]
    assert top == [(1024, interaction), (1024, 1024), (512, 1024), (256, 512)]
    assert shapes["head.weight"] == (1, 256)
    assert shapes["embeddings.c25.weight"] == (2, 128)


def test_weights_follow_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(11)
    want = torch.rand(3)
    torch.manual_seed(11)
    one, same, other = (create("dcnv2", FEATURES, "tiny", seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), want)
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
    assert not one.training


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: create("dlrmv3", FEATURES), r"there is no model 'dlrmv3'(?s:.*)there are dlrm, dcnv2"),
        (lambda: create("dlrm", FEATURES, "huge"), r"has no preset 'huge'(?s:.*)there are tiny, reference"),
        (lambda: FeatureSpec((), ("a",)), "needs categorical and numeric features(?s:.*)0 categorical, 1"),
        (lambda: FeatureSpec((("items", 3),), ("a",)), "'items' cannot name an embedding table"),
        (lambda: FeatureSpec((("a.b", 3),), ("a",)), r"'a\.b' cannot name an embedding table"),
        (lambda: FeatureSpec((("a", 3),), ("b",), ("c",)), "'c', which is no categorical feature"),
        (lambda: create("interformer", FeatureSpec((("a", 3),), ("b",))), "2 recent tokens of a sequence of"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_features_of_movielens_take_genres_and_title_as_sequence(tmp_path):
    ids = (("genre1", 3), ("x", 2), ("title_word", 4))
    data = PreparedData("m", tmp_path, {"train": Part(tmp_path)}, ids, ("n",), "label", "")
    features = FeatureSpec.of(data)
    assert features.sequence == ("genre1", "title_word")
    ids = (range(3), range(2), range(4))
    assert data.bindings[1] == InputBinding("ids", ("genre1", "x", "title_word"), "int64", 2, ids)


def test_the_zoo_without_torch():
    code = "import sys, loka_zoo, loka_onnx.data; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from loka_zoo import create, FeatureSpec\n"
        "from loka_onnx.errors import MissingPackage\n"
        "try: create('dlrm', FeatureSpec((('a', 2),), ('b',)))\n"
        "except MissingPackage as error: assert \"pip install 'loka-onnx[export]'\" in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
