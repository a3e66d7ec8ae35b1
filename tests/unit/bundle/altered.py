"""Bundles that were altered, with a manifest that is sealed as somebody could who may write all of it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_run import SampleRun

from loka_onnx.bundle.writer import BundleContents, BundleEngine
from loka_onnx.core import serde
from loka_onnx.core.digests import UNSEALED, digest_file, digest_files, seal
from loka_onnx.core.manifest import BundleFile, Manifest


def with_files(bundle: Path, place: Path, sizes: tuple[int, ...], seed: int) -> Path:
    """A copy with random files of these sizes in its report."""
    shutil.copytree(bundle, place, copy_function=shutil.copyfile)
    rng = np.random.default_rng(seed)
    added = []
    (place / "report").mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        data, path = rng.bytes(size), f"report/extra-{number}.bin"
        (place / path).write_bytes(data)
        added.append(BundleFile(path, size, hashlib.sha256(data).hexdigest()))
    manifest = read(bundle)
    files = tuple(sorted((*manifest.files, *added), key=lambda f: f.path))
    rewrite(place, replace(manifest, files=files, report=tuple(f.path for f in added)))
    return place


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes values of a manifest."""
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    change(document["value"])
    path.write_text(seal(json.dumps(document, indent=1)))


def put(bundle: Path, old: str, data: bytes, new: str = "") -> None:
    """Puts another file in the place of one, under a new name if there is one."""
    new = new or old
    (bundle / old).unlink()
    (bundle / new).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()

    def relist(value: dict[str, Any]) -> None:
        for file in value["files"]:
            if file["path"] == old:
                file.update(path=new, bytes=len(data), sha256=digest)
        for entry in (*value["engines"], value["fallback"]):
            if entry["path"] == old:
                entry.update(path=new, bytes=len(data), digest=digest)
        if value["cut"] is not None and value["cut"]["lookup"] == old:
            value["cut"]["lookup"] = new

    edit(bundle, relist)


def read(bundle: Path) -> Manifest:
    return serde.read(Manifest, bundle / "manifest.json")


def rewrite(bundle: Path, manifest: Manifest) -> str:
    """Writes a manifest as a bundle holds it; gives its digest."""
    text = seal(serde.dumps(replace(manifest, seal=UNSEALED))).encode()
    (bundle / "manifest.json").write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def engine_of(
    run: SampleRun, backend: str, architecture: str, files: dict[str, bytes], **changes: Any
) -> BundleEngine:
    """An engine made of files that nothing here can run, the main one first."""
    folder = run.contents.root / "engines" / "e"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    paths = [folder / name for name in files]
    artifact = replace(
        run.contents.engines[0].artifact,
        backend=backend,
        architecture=architecture,
        path=paths[0].relative_to(run.contents.root),
        bytes=sum(map(len, files.values())),
        digest=digest_files(paths) if len(paths) > 1 else digest_file(paths[0]),
        **changes,
    )
    return replace(run.contents.engines[0], artifact=artifact)


def built_by_inductor(
    sample: SampleRun, root: Path, batch: tuple[int, int, int, tuple[int, ...]], **options: Any
) -> BundleContents:
    """The contents with one engine, which Inductor builds for the CPU."""
    pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
    from loka_onnx.core.job import BatchSizes
    from loka_onnx.engines.inductor.backend import InductorBackend
    from loka_onnx.engines.request import BuildRequest

    known = sample.contents
    np.savez(root / "sample.npz", dense=known.sample["dense"])
    (root / "run/model").mkdir(parents=True)
    (root / "run" / known.model.path).write_bytes((sample.directory / known.model.path).read_bytes())
    built = InductorBackend().build(
        BuildRequest(
            model=sample.directory / known.model.path,
            plan=next(plan for plan in known.plans.plans if plan.id == "fp32"),
            sites=known.model.sites,
            target="cpu",
            architecture="cpu",
            batch=BatchSizes(*batch),
            output=root / "run/engines/e",
            sample=root / "sample.npz",
            relative_to=root / "run",
            options=options,
        )
    )
    assert built.is_built, built.detail
    largest = replace(known.batch, max=batch[2])
    engines = (BundleEngine(built, known.fallback),)
    return replace(known, root=root / "run", engines=engines, batch=largest)
