"""The peers table: every tool has its row, failures too, and device times find theirs."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from benchmarks.peers.device_times import DeviceTimesDoNotFit, merged
from benchmarks.peers.table import fastest_table, table_of

ORDER = ["fp32", "ours", "theirs", "crashed"]


def accuracy(delta: float) -> dict[str, Any]:
    ends = [delta, delta - 0.01, delta + 0.01]
    return {"rows": 1000, "delta_ne_percent": ends, "delta_auc": [-delta * 1e-4, -2e-4, 1e-4]}


def sites(*names: str, pairs: int = 4) -> dict[str, Any]:
    share = {"sites": list(names), "linear_sites": 8, "share": len(names) / 8}
    return {**share, "products": list(names), "pairs": pairs}


def figures() -> dict[str, Any]:
    ours = {
        **{"label": "Ours", "accuracy": accuracy(0.0033), "sites": sites("a", "b")},
        **{"calibration_seconds": 1.52, "seconds": 6.04, "cpu_seconds": 8.21, "peak_anonymous_mib": 479.4},
        "cpu": {"microseconds": 70414.4, "iqr": [70001.0, 70999.6], "simulated": True},
    }
    theirs = {
        **{"label": "Theirs | by default", "accuracy": accuracy(0.1209), "sites": sites()},
        **{"seconds": 31.6, "peak_anonymous_mib": 307.0, "cpu": {"not_run": "no kernel"}},
    }
    crashed = {"label": "Crashed", "failure": "RuntimeError: cannot", "log_tail": "…", "seconds": 1.0}
    cpu = {"microseconds": 1961.0, "iqr": [1950.2, 1970.0], "simulated": False}
    exact = {"label": "FP32", "accuracy": accuracy(0.0), "sites": sites(pairs=0), "cpu": cpu}
    return {
        **{"certification_rows": 299280, "linear_sites": 8, "reference": {"ne": 0.74541, "auc": 0.82544}},
        "variants": {"crashed": crashed, "theirs": theirs, "ours": ours, "fp32": exact},
    }


def cells_of(table: str, label: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]


def test_every_variant_has_a_row_in_the_order_of_the_record() -> None:
    table = table_of("dcnv2", figures(), ORDER)

    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert [row.split("|")[1].strip() for row in rows] == ["FP32", "Ours", "Theirs \\", "Crashed"]
    assert table.startswith("### DCNv2")
    assert "299,280 rows of certification; NE 0.7454, AUC 0.8254 in FP32" in table


def device() -> dict[str, Any]:
    return {
        "device": {"name": "a GPU"},
        "models": {
            "dcnv2": {
                "ours": {
                    "inductor": {"microseconds": {"256": 41.26, "2048": 80.0}, "simulated": False},
                    "onnxruntime": {"microseconds": {"2048": 912.0}, "simulated": True},
                },
                "theirs": {"inductor": {"failure": "declined: why"}},
            }
        },
        "beside": {"dcnv2": {"bf16-kernels": {"inductor": {"microseconds": {"256": 39.0}}}}},
        "compared": {"dcnv2": {"256": {}}},
    }


def test_times_of_a_device_become_columns_and_failures_are_told() -> None:
    found, rest = merged({"models": {"dcnv2": figures()}}, device())

    table = table_of("dcnv2", found["models"]["dcnv2"], ORDER)
    assert "inductor, batch 256, µs | inductor, batch 2048, µs | onnxruntime, batch 2048, µs" in table
    assert cells_of(table, "Ours")[-3:] == ["41.3", "80.0", "(912.0 simulated)"]
    assert cells_of(table, "Theirs")[-3:] == ["failed", "failed", "–"]
    assert cells_of(table, "FP32")[-3:] == ["–", "–", "–"]
    assert cells_of(table, "LoKA-ONNX's kernels, no mods, BF16")[-3:] == ["39.0", "–", "–"]
    assert "- Theirs | by default, inductor: declined: why" in table
    assert rest == {"device": {"name": "a GPU"}}


def timed(peer: str, upper: float | None, us: float, **more: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"peer": peer, "device": {"inductor": {"microseconds": {"256": us}, **more}}}
    if upper is not None:
        entry["accuracy"] = {"delta_ne_percent": [0.0, 0.0, upper]}
    return entry


def test_the_fastest_of_each_is_inside_the_budget_or_marked() -> None:
    variants = {
        "bf16": timed("none", 0.01, 40.0),
        "fp16": timed("none", 0.0, 44.0),
        "loka-bf16": timed("loka-onnx", 0.02, 20.0),
        "loka-split-bf16": timed("loka-onnx", 0.03, 10.0),
        "blanket-bf16": timed("loka-onnx", 0.5, 30.0),
        "modelopt-best": timed("model-optimizer", 0.5, 15.0),
        "modelopt-default": timed("model-optimizer", 0.02, 50.0),
        "quark-linears": timed("quark", None, 60.0) | {"timed_later": True},
        "onnxruntime-default": timed("onnxruntime", 0.0, 1.0, simulated=True),
    }
    added = {"bf16-kernels": {"inductor": {"microseconds": {"256": 25.0}}}}

    table = fastest_table({"dcnv2": {"variants": variants, "beside": added}}, 0.0002)

    row = "| DCNv2 | 256 | **20.0** (loka-bf16) | – | 40.0 (2.00 ×) | ✗ 30.0 (1.50 ×) | 50.0 (2.50 ×) "
    assert f"{row}| – | ✗ 60.0† (3.00 ×) |" in table
    # ONNX Runtime has no engine there that counts, so that nothing can be averaged.
    assert "| geometric mean of 0 where all have one |  | 1 × |  | – | – | – | – | – |" in table
    assert "at most 0.02 %" in table


def test_means_are_of_the_cells_where_all_have_an_engine() -> None:
    def all_of(scale: float) -> dict[str, Any]:
        peers = ("none", "loka-onnx", "model-optimizer", "onnxruntime", "quark")
        sides = zip(("bf16", "blanket", "a", "b", "c"), peers, strict=True)
        rows = {name: timed(peer, 0.5, 20.0 * scale) for name, peer in sides}
        return {"variants": rows | {"loka": timed("loka-onnx", 0.0, 10.0, fp8_products_engaged=2)}}

    lacking = all_of(8.0)
    del lacking["variants"]["c"]
    outside = all_of(8.0)
    outside["variants"]["loka"] = timed("loka-onnx", 0.5, 1.0)

    table = fastest_table({"dlrm": all_of(1.0), "dcnv2": all_of(4.0), "pnn": lacking, "wdl": outside}, 0.0002)

    assert "geometric mean of 2 where all have one |  | 1 × |  | 4.00 × | 4.00 × | 4.00 ×" in table
    assert "| DLRM | 256 | **10.0** (loka) | 10.0 (1.00 ×) | ✗ 20.0 (2.00 ×)" in table
    assert "| WDL | 256 | none inside | – | ✗ 160.0 | " in table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": {}}, r"no times in the document; it has beside, compared, device, models"),
        ({"models": {"other": {}}}, r"times of model 'other', which was not compared here"),
        ({"models": {"dcnv2": {"new": {}}}}, r"times of 'new' of model 'dcnv2', which was not compared"),
        ({"digests": {"dcnv2": {"ours": "b"}}}, r"times of 'ours' of model 'dcnv2' are of another graph: b"),
    ],
)
def test_times_of_something_else_are_refused(change: dict[str, Any], message: str) -> None:
    known = {"models": {"dcnv2": figures()}}
    known["models"]["dcnv2"]["variants"]["ours"]["digest"] = "a"

    with pytest.raises(DeviceTimesDoNotFit, match=message):
        merged(known, device() | change)
