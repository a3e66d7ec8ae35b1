"""The peers table: every tool has its row, failures too, and device times find theirs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.peers import compare
from benchmarks.peers.compare import CTR, describe
from benchmarks.peers.device_times import DeviceTimesDoNotFit, merged
from benchmarks.peers.judging import SETTINGS
from benchmarks.peers.table import markdown, table_of
from benchmarks.peers.trimming import trimmed
from benchmarks.peers.variants import EXPORTED, NARROW_LABELS, VARIANTS, chosen

ORDER = ["fp32", "ours", "theirs", "crashed"]


def accuracy(delta: float) -> dict[str, Any]:
    return {
        "rows": 1000,
        "delta_ne_percent": [delta, delta - 0.01, delta + 0.01],
        "delta_auc": [-delta * 1e-4, -2e-4, 1e-4],
    }


def sites(*names: str, pairs: int = 4) -> dict[str, Any]:
    return {
        "sites": list(names),
        "linear_sites": 8,
        "share": len(names) / 8,
        "products": list(names),
        "pairs": pairs,
    }


def figures() -> dict[str, Any]:
    ours = {
        "label": "Ours",
        "accuracy": accuracy(0.0033),
        "sites": sites("a", "b"),
        "calibration_seconds": 1.52,
        "seconds": 6.04,
        "cpu_seconds": 8.21,
        "peak_anonymous_mib": 479.4,
        "cpu": {"microseconds": 70414.4, "simulated": True},
    }
    theirs = {
        "label": "Theirs | by default",
        "accuracy": accuracy(0.1209),
        "sites": sites(),
        "seconds": 31.6,
        "peak_anonymous_mib": 307.0,
        "cpu": {"not_run": "no kernel"},
    }
    crashed = {"label": "Crashed", "failure": "RuntimeError: cannot", "log_tail": "…", "seconds": 1.0}
    exact = {
        "label": "FP32",
        "accuracy": accuracy(0.0),
        "sites": sites(pairs=0),
        "cpu": {"microseconds": 1961.0, "simulated": False},
    }
    variants = {"crashed": crashed, "theirs": theirs, "ours": ours, "fp32": exact}
    return {
        "certification_rows": 299280,
        "linear_sites": 8,
        "reference": {"ne": 0.74541, "auc": 0.82544},
        "variants": variants,
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


def test_cells_are_the_figures() -> None:
    table = table_of("dcnv2", figures(), ORDER)

    assert cells_of(table, "Ours") == [
        "Ours",
        "2 of 8",
        "25 %",
        "+0.0033 [-0.0067, +0.0133]",
        "-0.00 [-2.00, +1.00]",
        "1.5",
        "6.0",
        "8.2",
        "479",
        "(70414 simulated)",
    ]
    assert cells_of(table, "FP32")[-1] == "1961"
    assert cells_of(table, "Theirs")[-5:] == ["–", "31.6", "–", "307", "does not run"]


def test_a_failure_is_shown_with_its_message_and_so_are_useless_pairs() -> None:
    table = table_of("dcnv2", figures(), ORDER)

    assert cells_of(table, "Crashed")[1:5] == ["failed", "–", "failed", "failed"]
    assert "- Crashed: RuntimeError: cannot" in table
    assert "- Theirs | by default: 4 Q/DQ pairs, none of which makes a product FP8." in table
    assert "- FP32:" not in table


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
        "beside": {"dcnv2": {"loka-wide": {"inductor": {"microseconds": {"256": 39.0}}}}},
        "compared": {"dcnv2": {"256": {}}},
    }


def test_times_of_a_device_become_columns_and_failures_are_told() -> None:
    found, rest = merged({"models": {"dcnv2": figures()}}, device())

    table = table_of("dcnv2", found["models"]["dcnv2"], ORDER)
    assert "inductor, batch 256, µs | inductor, batch 2048, µs | onnxruntime, batch 2048, µs" in table
    assert cells_of(table, "Ours")[-3:] == ["41.3", "80.0", "(912.0 simulated)"]
    assert cells_of(table, "Theirs")[-3:] == ["failed", "failed", "–"]
    assert cells_of(table, "FP32")[-3:] == ["–", "–", "–"]
    assert cells_of(table, "LoKA-ONNX (mods and kernels, nothing in FP8, BF16)")[-3:] == ["39.0", "–", "–"]
    assert "- Theirs | by default, inductor: declined: why" in table
    assert rest == {"device": {"name": "a GPU"}}


def test_merging_leaves_the_figures_alone() -> None:
    before = {"models": {"dcnv2": figures()}}

    merged(before, device())

    assert before == {"models": {"dcnv2": figures()}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": {}}, r"no times in the document; it has beside, compared, device, models"),
        ({"models": {"other": {}}}, r"times of model 'other', which was not compared here"),
        ({"models": {"dcnv2": {"new": {}}}}, r"times of 'new' of model 'dcnv2', which was not compared"),
    ],
)
def test_times_of_something_else_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceTimesDoNotFit, match=message):
        merged({"models": {"dcnv2": figures()}}, device() | change)


def test_graphs_are_described_for_the_device_and_failed_ones_are_not(tmp_path: Path) -> None:
    found = {"models": {"dcnv2": figures()}}
    for name in found["models"]["dcnv2"]["variants"]:
        (tmp_path / "models" / "dcnv2" / name).mkdir(parents=True)
        (tmp_path / "models" / "dcnv2" / name / "model.onnx").touch()
    for entry in found["models"]["dcnv2"]["variants"].values():
        entry |= {"peer": "none", "precision": "fp32"}
    found["models"]["dcnv2"]["variants"]["ours"]["plan"] = {"id": "fp8-safe"}
    found["models"]["dcnv2"]["variants"]["theirs"]["same_plan_as"] = "ours"

    describe(tmp_path, found, 0.0002)

    places = {path.parent.name: path for path in tmp_path.glob("models/dcnv2/*/variant.json")}
    assert set(places) == {"fp32", "ours", "theirs"}
    plans = {name: json.loads(path.read_text())["plan"] for name, path in places.items()}
    assert plans == {"fp32": None, "ours": {"id": "fp8-safe"}, "theirs": {"id": "fp8-safe"}}
    inside = {name: json.loads(path.read_text())["inside_budget"] for name, path in places.items()}
    # Upper ends are .01, .0133 and .1309 %.
    assert inside == {"fp32": True, "ours": True, "theirs": False}


def test_one_command_writes_a_record_that_has_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    (work / "figures").mkdir(parents=True)
    known = figures()
    known["variants"] = {"fp32": known["variants"]["fp32"], "loka": known["variants"]["ours"]}
    (work / "figures" / "dcnv2.json").write_text(json.dumps(known))
    times = tmp_path / "device.json"
    taken = device()
    taken["models"]["dcnv2"] = {"loka": taken["models"]["dcnv2"]["ours"]}
    times.write_text(json.dumps(taken))
    where = ["--work", str(work), "--out", str(tmp_path)]

    for given in (["--merge", str(times)], ["--table"]):
        monkeypatch.setattr(sys, "argv", ["compare", *where, *given])
        compare.main()

    record = json.loads((tmp_path / "peers.json").read_text())
    printed = capsys.readouterr().out
    assert markdown(record) in printed
    assert SETTINGS in printed
    assert "(912.0 simulated)" in printed
    assert record["settings"]["device"] == {"device": {"name": "a GPU"}}
    assert "nvidia-modelopt[onnx]==0.47.0" in record["settings"]["pins"]["model-optimizer"]


def test_the_record_has_each_fact_once_and_no_path_of_this_machine() -> None:
    known = figures()
    ours = known["variants"]["ours"]
    ours |= {"plan": {"id": "fp8-safe"}, "origins": {"a": ["a"]}, "call": "run", "seconds": 6.041234567}
    known["variants"]["narrow"] = dict(ours)
    known["variants"]["crashed"]["log_tail"] = "File '/home/me/work/scratch/a', '/home/me/b'"
    places = {"/home/me/work": "WORK", "/home/me": "HERE"}

    found = trimmed(known, {"narrow": "ours"}, places)["variants"]

    assert found["ours"]["plan"] == {"id": "fp8-safe"}
    assert found["ours"]["seconds"] == 6.04123
    assert found["ours"]["sites"]["products"] == 2
    assert found["narrow"]["same_plan_as"] == "ours"
    assert not {"plan", "origins", "call"} & found["narrow"].keys()
    assert found["narrow"]["accuracy"] == found["ours"]["accuracy"]
    assert found["crashed"]["log_tail"] == "File 'WORK/scratch/a', 'HERE/b'"
    assert "origins" in ours and len(ours["sites"]["products"]) == 2


def test_variants_have_names_and_peers_of_their_own() -> None:
    names = [EXPORTED, *(v.name for v in VARIANTS), *(v.narrow for v in VARIANTS if v.narrow)]

    assert len(set(names)) == len(names)
    assert {v.narrow for v in VARIANTS if v.narrow} == set(NARROW_LABELS)
    pins = {path.stem for path in (Path(compare.__file__).parent / "environments").glob("*.txt")}
    assert {v.peer for v in VARIANTS if v.child} <= pins
    for variant in VARIANTS:
        if variant.child:
            assert (Path(compare.__file__).parent / "children" / variant.child).is_file()
    with pytest.raises(SystemExit, match="no such variant"):
        chosen(["nobody"])


def test_the_ctr_models_are_those_that_there_are() -> None:
    from benchmarks.peers.ctr_models import CTR_MODELS

    assert CTR == CTR_MODELS
