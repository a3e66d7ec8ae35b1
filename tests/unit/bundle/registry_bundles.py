"""Bundles for the registry tests: one real one, and others that differ from it in files of a given size."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

import numpy as np

from loka_onnx.core import serde
from loka_onnx.core.manifest import BundleFile, Manifest
from loka_onnx.core.seal import UNSEALED, seal


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
    rewrite(place, dataclasses.replace(manifest, files=files, report=tuple(f.path for f in added)))
    return place


def read(bundle: Path) -> Manifest:
    return serde.read(Manifest, bundle / "manifest.json")


def rewrite(bundle: Path, manifest: Manifest) -> str:
    """Writes a manifest as a bundle holds it; gives its digest."""
    text = seal(serde.dumps(dataclasses.replace(manifest, seal=UNSEALED))).encode()
    (bundle / "manifest.json").write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
