"""From an `.onnx` file of unknown origin to a bundle: `python examples/bare_onnx.py [DIRECTORY]`.

Nothing is known of the model but its file: an older operator set, a LayerNorm in its parts, an Einsum.
Nothing is known of the rows but what goes in: there are no labels, so INT8 (on a CPU that does
not multiply it, FP8) is judged on KL, the part of the loss change that needs none. Replace `write_model` and
`write_rows` by your own files. Needs `loka-onnx[cpu]`, and neither PyTorch nor TensorFlow; takes some twenty
seconds on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import loka_onnx
from loka_onnx.config import build_run_config

ITEMS, NUMBERS, WIDTH, HIDDEN, ROWS = 300, 32, 32, 128, 60_000


def write_model(path: Path) -> None:
    """Stands for a file that somebody hands you: numbers and one id to a click probability, opset 13."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    constants = {
        "table": weight(ITEMS, WIDTH) * 8,
        "w0": weight(NUMBERS, WIDTH),
        "w1": weight(2 * WIDTH, HIDDEN),
        "w2": weight(HIDDEN, HIDDEN),
        "w3": weight(HIDDEN, 1),
        "gamma": np.ones(2 * WIDTH, np.float32),
        "beta": np.zeros(2 * WIDTH, np.float32),
        "two": np.float32(2),
        "epsilon": np.float32(1e-5),
        "bias": np.float32(-1.5),
    }
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "item"], ["looked_up"], "lookup"),
        node("Einsum", ["numbers", "w0"], ["dense"], "dense", equation="bi,io->bo"),
        node("Concat", ["dense", "looked_up"], ["joined"], "joined", axis=1),
        # LayerNormalization is an operator from opset 17 on; before, exporters write out its parts.
        node("ReduceMean", ["joined"], ["mean"], "norm/mean", axes=[1]),
        node("Sub", ["joined", "mean"], ["centred"], "norm/centred"),
        node("Pow", ["centred", "two"], ["squared"], "norm/squared"),
        node("ReduceMean", ["squared"], ["variance"], "norm/variance", axes=[1]),
        node("Add", ["variance", "epsilon"], ["shifted"], "norm/shifted"),
        node("Sqrt", ["shifted"], ["deviation"], "norm/deviation"),
        node("Div", ["centred", "deviation"], ["normal"], "norm/normal"),
        node("Mul", ["normal", "gamma"], ["scaled"], "norm/scaled"),
        node("Add", ["scaled", "beta"], ["normed"], "norm/normed"),
        node("MatMul", ["normed", "w1"], ["h1"], "over/0"),
        node("Relu", ["h1"], ["a1"], "over/relu0"),
        node("MatMul", ["a1", "w2"], ["h2"], "over/1"),
        node("Relu", ["h2"], ["a2"], "over/relu1"),
        node("MatMul", ["a2", "w3"], ["score"], "over/2"),
        node("Add", ["score", "bias"], ["logit"], "over/bias"),
        node("Sigmoid", ["logit"], ["p_click"], "over/sigmoid"),
    ]
    graph = helper.make_graph(
        nodes,
        "ranker",
        [
            helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["N", NUMBERS]),
            helper.make_tensor_value_info("item", TensorProto.INT64, ["N"]),
        ],
        [helper.make_tensor_value_info("p_click", TensorProto.FLOAT, ["N", 1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def write_rows(path: Path) -> None:
    """Stands for logged requests: one array for each input, named as it is."""
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal((ROWS, NUMBERS)).astype(np.float32)
    np.savez(path, numbers=numbers, item=rng.integers(0, ITEMS, ROWS))


def main(directory: Path) -> None:
    """Look at the model, run the pipeline without labels, say what was rewritten and decided."""
    directory.mkdir(parents=True, exist_ok=True)
    write_model(directory / "ranker.onnx")
    write_rows(directory / "requests.npz")

    graph = onnx.load(directory / "ranker.onnx").graph
    print(
        "inputs", *(value.name for value in graph.input), "· outputs", *(value.name for value in graph.output)
    )
    config = build_run_config(
        {
            "model": {"onnx": "ranker.onnx"},
            # A probability is clipped and turned into a logit; give the logit itself if it is an output.
            "outputs": [{"name": "p_click", "kind": "probability", "label": None, "budget": 0.0002}],
            "data": {"path": "requests.npz", "split": {"by": "order"}, "synthetic": True},
            "batch": {"serve": [64, 512]},
            "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
        },
        directory,
    )
    result = loka_onnx.run(config, loka_onnx.RunOptions(force=True))  # starts over where it ran before
    for name in ("exported", "modified"):
        model = getattr(result.report, name)
        print(f"{name}: {', '.join(site.name for site in model.sites)}")
    for target in result.choice.targets:
        print(f"{target.target}: plan {target.plan}, {target.reason}")
    for evaluation in result.report.evaluations.evaluations:
        if evaluation.split == "certification" and evaluation.plan.startswith(("fp8", "int8")):
            change = evaluation.outputs[0].difference.judged
            print(
                f"{evaluation.plan}: KL {change.value:.4%} [{change.lower:.4%}, {change.upper:.4%}] "
                "of the mean entropy"
            )
    print(f"bundle {result.bundle}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/bare-onnx"))
    main(parser.parse_args().directory)
