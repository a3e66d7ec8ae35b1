"""`loka-onnx run --sign`: the bundle takes its place signed; a resumed run signs again only where it must."""

from __future__ import annotations

import shutil

import pytest
from synthetic_runs import make_workplace, tree

import loka_onnx
from loka_onnx.bundle.format.signature import verify_signature
from loka_onnx.bundle.signing import write_key_pair
from loka_onnx.errors import BundleInvalid, ConfigError
from loka_onnx.pipeline.run import RunOptions


def test_a_run_signs_its_bundle(tmp_path, command):
    place = make_workplace(tmp_path / "place")
    ours, others = (write_key_pair(tmp_path / "keys", name) for name in ("ours", "others"))
    done = command("run", place.run_file, "--quiet", "--sign", ours.private)
    assert done.code == 0, done.err
    bundle = place.output / "bundle"
    assert verify_signature(bundle, [ours.public]) == ours.fingerprint
    with pytest.raises(BundleInvalid):
        verify_signature(bundle, [others.public])
    loka_onnx.load(bundle, keys=[ours.public]).close()
    assert command("bundle", "verify", bundle, "--key", others.public).code == 3

    # Nothing is done again for the same key, and the bundle alone for another, or for none.
    before = tree(place.output)
    loka_onnx.run(place.run_file, RunOptions(resume=True, sign=ours.private))
    assert tree(place.output) == before
    loka_onnx.run(place.run_file, RunOptions(resume=True, sign=others.private))
    assert verify_signature(bundle, [others.public]) == others.fingerprint
    loka_onnx.run(place.run_file, RunOptions(resume=True))
    assert not (bundle / "signature.json").exists()
    changed = {name for name, data in tree(place.output).items() if before.get(name) != data}
    assert {name.split("/")[0] for name in changed} <= {"bundle", "run.json"}


def test_a_key_that_cannot_be_read_is_refused_before_anything_is_done(tmp_path):
    place = make_workplace(tmp_path / "place")
    pair = write_key_pair(tmp_path / "keys")
    for wrong in (pair.public, tmp_path / "absent.key"):
        with pytest.raises(ConfigError):
            loka_onnx.run(place.run_file, RunOptions(sign=wrong))
    assert not place.output.exists()
    shutil.rmtree(place.path)
