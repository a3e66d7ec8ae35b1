"""A package with every fused kernel in it: a Wukong layer in FP8, compiled ahead of time and loaded.

On the CPU the same graph runs by the plain operators that stand for the kernels there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from built_engines import DEVICES, Built  # noqa: E402
from tiny_models import GraphWriter, TinyModel, make_plan, write_sample  # noqa: E402

from loka_onnx.core.formats import Precision  # noqa: E402
from loka_onnx.core.site import SiteKind  # noqa: E402
from loka_onnx.engines.inductor.package import read_engine  # noqa: E402

N, D, K, OWN, HIDDEN = 16, 16, 8, 10, 64
"""Tokens, their length, columns of the interaction, the block's own tokens, and its hidden layer."""
FUSED = {
    "project": "fused FactorizationNorm",
    "interact": "fused FactorizationNorm",
    "norm": "fused FactorizationNorm",
    "mix": "fused TokenResidualNorm",
    "last": "fused TokenResidualNorm",
}


def layer(folder: Path) -> TinyModel:
    """LN(concat(F, W·X) + X), F = fc2(relu(fc1(LN(X·(Xᵀ·Y)))))."""
    folder.mkdir(parents=True)
    w = GraphWriter(Precision.BF16)
    int64 = onnx.TensorProto.INT64

    def norm(x: str, name: str, width: int) -> str:
        gain = w.constant(f"{name}/gain", np.linspace(0.5, 1.5, width))
        shift = w.constant(f"{name}/shift", np.linspace(-1.0, 1.0, width))
        made = w.op("LayerNormalization", [x, gain, shift], name, axis=-1)
        w.site(name, SiteKind.NORM, width, 0, made)
        return made

    def plain(a: str, b: str, name: str, shape: tuple[int, int]) -> str:
        made = w.op("MatMul", [a, b], name)
        kind = SiteKind.LINEAR if b.endswith("/w") else SiteKind.INTERACTION
        w.site(name, kind, *shape, made)
        return made

    def linear(x: str, name: str, shape: tuple[int, int]) -> str:
        weight = w.narrow_weight(name, shape)
        made = w.op("MatMul", [w.quantized(x, f"{name}/x"), weight], name)
        w.site(name, SiteKind.LINEAR, *shape, made)
        return w.op("Add", [made, w.constant(f"{name}/b", np.linspace(-0.5, 0.5, shape[1]))], f"{name}/bias")

    x = w.enter("x")
    turned = w.op("Transpose", [x], "turned", perm=[0, 2, 1])
    projected = plain(turned, w.weight("project", (N, K)), "project", (N, K))
    interaction = plain(x, projected, "interact", (D, K))
    flat = w.op("Reshape", [interaction, w.constant("flat", [-1, N * K], int64)], "flatten")
    hidden = w.op("Relu", [linear(norm(flat, "norm", N * K), "fc1", (N * K, HIDDEN))], "relu")
    own = linear(hidden, "fc2", (HIDDEN, OWN * D))
    own = w.op("Reshape", [own, w.constant("tokens", [-1, OWN, D], int64)], "own")
    mixed = plain(turned, w.weight("mix", (N, N - OWN)), "mix", (N, N - OWN))
    mixed = w.op("Transpose", [mixed], "back", perm=[0, 2, 1])
    joined = w.op("Concat", [own, mixed], "joined", axis=1)
    out = norm(w.op("Add", [joined, x], "residual"), "last", D)
    w.leave(w.op("Reshape", [out, w.constant("row", [-1, N * D], int64)], "rows"))
    path = w.save(folder / "model.onnx", {"x": (N, D)})
    sites = tuple(w.sites)
    plan = make_plan(sites, base=Precision.BF16, fp8=("fc1", "fc2"))
    return TinyModel(path, plan, sites, write_sample(folder / "sample.npz", {"x": (N, D)}))


@pytest.fixture(scope="module", params=DEVICES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built.on(request.param, tmp_path_factory.mktemp("layer"), layer)


def test_every_kernel_is_in_the_package(built: Built) -> None:
    assert not built.artifact.fallbacks, [site.evidence for site in built.artifact.fallbacks]
    engine = read_engine(built.engine)
    kernels = {site.site: site.kernel for site in engine.sites}
    assert {name: kernels[name] for name in FUSED} == FUSED
    products = {product.node: product.operands for product in engine.programs[0].products}
    assert products["fc1"] == products["fc2"] == ("float8_e4m3fn", "float8_e4m3fn")


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 16])
def test_it_answers_as_the_graph_says(built: Built, rows: int) -> None:
    """Sizes with a CUDA graph, sizes that are padded to one, and one without."""
    with built.open() as runner:
        found = runner.run(built.inputs(rows))["out"]
    exact = built.exact(rows)
    assert found.shape == exact.shape == (rows, N * D)
    # BF16 between the nodes: 8 bits of values up to 3, and activations that it moves over a step of E4M3.
    error = np.abs(found - exact)
    assert 1e-5 < error.mean() < 0.02
    assert error.max() < 0.2


def test_a_resident_batch_computes_it_again_and_again(built: Built) -> None:
    """Nothing that a launch leaves behind changes the next answer."""
    with built.open() as runner:
        first = {rows: runner.run(built.inputs(rows))["out"] for rows in (4, 8)}
        resident = runner.resident(built.inputs(8))
        for _ in range(5):
            resident.launch()
        resident.wait()
        for rows, answer in first.items():
            np.testing.assert_array_equal(runner.run(built.inputs(rows))["out"], answer)


def test_a_resident_batch_is_the_one_that_was_given(built: Built) -> None:
    """What its launches leave in the output of the CUDA graph is the answer to its rows."""
    if built.artifact.architecture == "cpu":
        pytest.skip("needs a GPU: the CPU has no CUDA graphs")
    with built.open() as runner:
        answer = runner.run(built.inputs(8))["out"]
        (output,) = runner._executor._served[8].captured.outputs
        runner.resident({"x": -built.inputs(8)["x"]})()
        assert not np.array_equal(output.cpu().numpy(), answer)
        runner.resident(built.inputs(8))()
        np.testing.assert_array_equal(output.cpu().numpy(), answer)


@pytest.mark.parametrize(("rows", "size"), [(2, 4), (3, 4), (4, 4), (7, 8), (8, 8)])
def test_arrays_and_pinned_memory_are_answered_alike(built: Built, rows: int, size: int) -> None:
    """Requests change between launches of the session's graph and of the graphs of a caller's memory."""
    if built.artifact.architecture == "cpu":
        pytest.skip("needs a GPU: the CPU has no CUDA graphs")
    with built.open() as runner:
        (output,) = runner._executor._served[size].captured.outputs
        held, answers = [runner.buffers(rows) for _ in range(3)], []
        for seed in range(4):
            x = np.roll(np.load(built.model.sample)["x"], seed, axis=0)[:rows] * (1 - seed % 2 * 2)
            runner.resident({"x": x})()
            answers.append(output.cpu().numpy()[:rows])
            np.testing.assert_array_equal(runner.run({"x": x})["out"], answers[-1])
            for buffers in held:
                buffers["x"][:] = x
                np.testing.assert_array_equal(runner.run(buffers)["out"], answers[-1])
            # The graphs of the others stay valid without this one, whose memory is free again.
            held[seed % 3] = runner.buffers(rows)
        assert not any(np.array_equal(answer, answers[-1]) for answer in answers[:-1])
