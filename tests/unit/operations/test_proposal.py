"""`loka-onnx init`: what is matched by which rule, what is marked, and that the file can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from onnx_text import parsed

from loka_onnx.cli.main import main
from loka_onnx.config import build_run_config
from loka_onnx.errors import ConfigError, DataError
from loka_onnx.operations.proposal import Proposal, propose, run_name

ROWS = 400


def write_rows(path: Path, **more: Any) -> Path:
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "user_id": draw.integers(0, 50, ROWS),
        "item": draw.integers(0, 9, ROWS),
        "price": draw.random(ROWS, dtype=np.float32),
        "age": draw.random(ROWS, dtype=np.float32),
        "clicked": draw.integers(0, 2, ROWS),
        "history": draw.integers(0, 9, (ROWS, 4)).tolist(),
        **more,
    }
    pq.write_table(pa.table({name: value for name, value in columns.items() if value is not None}), path)
    return path


def write_model(path: Path, inputs: str, last: str = "Sigmoid") -> Path:
    """A model whose declared inputs are those given; ``x`` (batch, 2) is what it computes with."""
    declared = f"float[n, 2] x{',' if inputs else ''} {inputs}"
    body = f"y = MatMul(x, w) score = {last}(y)"
    onnx.save(parsed(body, {"w": WEIGHT}, inputs=declared, outputs="float[n, 1] score"), path)
    return path


WEIGHT = np.array([[0.5], [-0.25]])


def proposed_of(tmp_path: Path, body: str, outputs: str, **constants: Any) -> Proposal:
    """Of a model of ``x`` (batch, 2) with the constants ``w`` (2, 1) and ``w3`` (2, 3)."""
    known = {"w": WEIGHT, "w3": np.repeat(WEIGHT, 3, axis=1)}
    model = parsed(body, known | constants, inputs="float[n, 2] x", outputs=outputs)
    onnx.save(model, tmp_path / "ranker.onnx")
    return propose(tmp_path / "ranker.onnx", write_rows(tmp_path / "rows.parquet"), home=tmp_path)


def proposed(tmp_path: Path, inputs: str = "", last: str = "Sigmoid", **columns: Any) -> Proposal:
    rows = write_rows(tmp_path / "rows.parquet", **columns)
    return propose(write_model(tmp_path / "ranker.onnx", inputs, last), rows, home=tmp_path)


def columns_of(proposal: Proposal) -> dict[str, tuple[str, ...]]:
    return {match.input: match.columns for match in proposal.matches}


def test_inputs_are_matched_by_name_end_of_name_and_width(tmp_path: Path) -> None:
    proposal = proposed(tmp_path, "int64[n] user_id, int64[n] features_item_, int64[n, 4] seq")
    matched = {
        "x": ("price", "age"), "user_id": ("user_id",), "features_item_": ("item",), "seq": ("history",)
    }  # fmt: skip
    assert columns_of(proposal) == matched
    rules = {match.input for match in proposal.matches if match.rule not in {"", "same name"}}
    assert rules == matched.keys() - {"user_id"}
    # The file says what the document says, and is a run file.
    proposal = proposed(tmp_path, "int64[n] user_id")
    assert yaml.safe_load(proposal.text) == proposal.document
    config = build_run_config(proposal.document, tmp_path)
    assert config.data.inputs["x"] == ("price", "age")
    assert [target.device for target in config.targets][-1] == "cpu"
    # Rows without labels, as npz.
    np.savez(tmp_path / "rows.npz", x=np.ones((ROWS, 2), np.float32))
    proposal = propose(write_model(tmp_path / "m.onnx", ""), tmp_path / "rows.npz", home=tmp_path)
    assert proposal.document["outputs"][0]["label"] is None
    assert not proposal.unmatched


@pytest.mark.parametrize(("shops", "columns"), [(100, ("user_id", "item", "shop")), (10, ())])
def test_a_matrix_of_ids_takes_the_group_too_and_only_ids_of_its_tables(
    tmp_path: Path, shops: int, columns: tuple[str, ...]
) -> None:
    """TorchRec's and DeepCTR's rankers look up the user by which rows are split; each column has a table."""
    sizes = {"users": 50, "items": 9, "shops": shops}
    tables = " ".join(f"t_{name} = ConstantOfShape(s_{name})" for name in sizes)
    looked_up = " ".join(f"e_{name} = Gather(t_{name}, c_{name})" for name in sizes)
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (int64[n, 3] ids) => (float[n, 1] score)
        <{", ".join(f"int64[2] s_{name} = {{{size}, 1}}" for name, size in sizes.items())},
         int64[1] one = {{1}}> {{
            {tables} a, b, c = Split<axis = 1, num_outputs = 3>(ids)
            c_users = Squeeze(a, one) c_items = Squeeze(b, one) c_shops = Squeeze(c, one) {looked_up}
            both = Add(e_users, e_items) all = Add(both, e_shops) score = Sigmoid(all)
        }}
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "ranker.onnx")
    draw = np.random.default_rng(1)
    rows = write_rows(
        tmp_path / "rows.parquet", shop=draw.permutation(np.arange(ROWS) % 100), price=None, age=None
    )
    assert columns_of(propose(tmp_path / "ranker.onnx", rows, home=tmp_path)) == {"ids": columns}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Rank Net.onnx", "rank-net"),
        ("rechub-deepfm/model.onnx", "rechub-deepfm"),
        ("Wide/models/final/model.onnx", "wide"),
    ],
)
def test_the_name_is_the_file_s_or_that_of_a_folder_that_says_something(
    tmp_path: Path, file: str, name: str
) -> None:
    assert run_name(tmp_path / file) == name
    assert run_name(Path("/model.onnx")) == "ranker"


@pytest.mark.parametrize(("squeeze", "smallest"), [("Squeeze(y)", 2), ("Squeeze(y, last)", 1)])
def test_a_model_that_fails_at_one_row_gets_batches_of_two_and_the_reason(
    tmp_path: Path, squeeze: str, smallest: int
) -> None:
    body = f"y = MatMul(x, w) s = {squeeze} score = Unsqueeze(s, last)"
    proposal = proposed_of(tmp_path, body, "float[n, 1] score", last=[1])
    assert proposal.document["batch"]["min"] == smallest
    assert ("(Unsqueeze)" in proposal.notes.get("batch", "")) == (smallest == 2)
    assert yaml.safe_load(proposal.text) == proposal.document


@pytest.mark.parametrize(
    ("last", "columns", "kind"),
    [
        ("Sigmoid", {}, "probability"),
        ("Identity", {}, "logit"),
        ("Identity", {"clicked": None, "label": np.linspace(0, 5, ROWS)}, "regression"),
    ],
)
def test_the_kind_is_read_from_the_graph_and_the_label(
    tmp_path: Path, last: str, columns: dict[str, Any], kind: str
) -> None:
    proposal = proposed(tmp_path, last=last, **columns)
    (output,) = proposal.document["outputs"]
    assert output["kind"] == kind
    assert "outputs[0].kind" in proposal.notes


def test_an_embedding_beside_a_score_is_not_proposed(tmp_path: Path) -> None:
    body = """user_vector = MatMul(x, w3)  sum = ReduceSum<keepdims=0>(user_vector, one)
        score = Sigmoid(sum)"""
    proposal = proposed_of(tmp_path, body, "float[n, 3] user_vector, float[n] score", one=[1])
    assert [output["name"] for output in proposal.document["outputs"]] == ["score"]


def test_rows_in_the_order_of_time_are_split_by_order_and_others_by_the_group(tmp_path: Path) -> None:
    assert proposed(tmp_path).document["data"]["split"]["by"] == "hash"
    data = proposed(tmp_path, timestamp=np.arange(ROWS)).document["data"]
    assert (data["split"]["by"], data["group"]) == ("order", "user_id")


def test_what_is_not_known_is_refused_with_the_nearest(tmp_path: Path) -> None:
    rows, model = write_rows(tmp_path / "rows.parquet"), write_model(tmp_path / "m.onnx", "")
    with pytest.raises(ConfigError) as refused:
        propose(model, rows, home=tmp_path, devices=["h100"])
    assert refused.value.code == "E1641"
    assert "nvidia-h100" in refused.value.remedy
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    for data, labels, code in ((rows, ["klicked"], "E1639"), (tmp_path / "rows.csv", [], "E1640")):
        with pytest.raises(DataError) as unread:
            propose(model, data, home=tmp_path, labels=labels)
        assert unread.value.code == code


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_the_command_writes_a_file_once_and_run_takes_model_and_rows(tmp_path: Path) -> None:
    rows, model = write_rows(tmp_path / "rows.parquet"), write_model(tmp_path / "ranker.onnx", "")
    target = tmp_path / "RUN.yaml"
    assert command("init", model, rows, "-o", target) == 0
    assert command("init", model, rows, "-o", target) == 2
    assert yaml.safe_load(target.read_text())["model"] == {"onnx": "ranker.onnx"}
    # 400 rows judge nothing, but the run begins.
    command("run", model, rows, "--output", tmp_path / "run", "--set", "calibration.rows=64")
    assert (tmp_path / "run" / "model" / "exported.json").exists()


def test_an_input_without_a_column_is_listed_with_candidates_and_not_run(tmp_path: Path) -> None:
    inputs = "int64[n] zip, int64[n] merchant"
    proposal = proposed(tmp_path, inputs)
    assert {match.input for match in proposal.unmatched} == {"zip", "merchant"}
    assert "item" in proposal.unmatched[0].candidates
    assert "clicked" not in proposal.unmatched[0].candidates
    model = write_model(tmp_path / "ranker.onnx", inputs)
    assert command("run", model, tmp_path / "rows.parquet", "--output", tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()
