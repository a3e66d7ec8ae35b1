"""An engine of the inductor backend in a bundle: a program, loaded from a trusted origin only."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sample_run import SampleRun, expectation

from loka_onnx.bundle.writer import BundleEngine, write_bundle
from loka_onnx.engines.inductor.backend import InductorBackend
from loka_onnx.engines.request import BatchRange, BuildRequest
from loka_onnx.runtime import load

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")


@pytest.mark.slow
def test_a_bundle_is_served_by_a_package(sample: SampleRun, tmp_path: Path) -> None:
    known = sample.contents
    rows = known.sample["dense"]
    np.savez(tmp_path / "sample.npz", dense=rows)
    plan = next(plan for plan in known.plans.plans if plan.id == "fp32")
    artifact = InductorBackend().build(
        BuildRequest(
            model=sample.directory / known.model.path,
            plan=plan,
            sites=known.model.sites,
            target="cpu",
            architecture="cpu",
            batch=BatchRange(1, 8, 4096),
            output=tmp_path / "run" / "engines" / "e",
            sample=tmp_path / "sample.npz",
            relative_to=tmp_path / "run",
        )
    )
    assert artifact.is_built, artifact.detail
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / known.model.path).write_bytes((sample.directory / known.model.path).read_bytes())
    exact = known.fallback.outputs["ctr"]
    contents = replace(
        known, root=tmp_path / "run", engines=(BundleEngine(artifact, expectation(exact[:, 0])),)
    )
    bundle = write_bundle(contents, tmp_path / "bundle")
    with_trust = load(bundle, trust=True)
    assert with_trust.entry.backend == "inductor"
    assert with_trust.health().ready
    for count in (1, 3, 8):
        np.testing.assert_allclose(with_trust.infer({"dense": rows[:count]})["ctr"], exact[:count], atol=1e-4)
    with_trust.close()
    assert load(bundle).entry.backend == "onnxruntime"
