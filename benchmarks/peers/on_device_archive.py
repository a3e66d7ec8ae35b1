"""One archive in few parts of what `on_device_models` prepared: each constant of its ONNX files once."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

from loka_onnx.errors import ModelError

PART_BYTES = 25 << 20
PARTS = "models.tar.xz."
_LEAST_BLOB = 1 << 10
"""Bytes of a constant from which it is kept apart, so that variants which share it store it once."""


def pack(directory: Path, out: Path) -> list[Path]:
    """Pack a directory into parts of at most `PART_BYTES`, each constant of its ONNX files once.

    Returns:
        The parts.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    manifest: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        archive, seen = Path(scratch) / "models.tar.xz", set[str]()
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            for path in sorted(each for each in directory.rglob("*") if each.is_file()):
                entry, blobs = _taken_apart(path)
                manifest[path.relative_to(directory).as_posix()] = entry
                for digest, data in blobs.items():
                    if digest not in seen:
                        seen.add(digest)
                        _add(tar, f"blobs/{digest}", data)
            _add(tar, "manifest.json", json.dumps(manifest, sort_keys=True).encode())
        data = archive.read_bytes()
    parts = []
    for number, start in enumerate(range(0, len(data), PART_BYTES)):
        parts.append(out / f"{PARTS}{number:02d}")
        parts[-1].write_bytes(data[start : start + PART_BYTES])
    return parts


def unpack(parts: Sequence[Path], target: Path) -> None:
    """Write what was packed, bit for bit.

    Raises:
        ModelError: A part is missing or altered, or a file is not what was packed.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as stream:
        for part in sorted(parts):
            stream.write(part.read_bytes())
        stream.seek(0)
        try:
            with tarfile.open(fileobj=stream, mode="r:xz") as tar:
                held = {member.name: _read(tar, member) for member in tar.getmembers()}
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise ModelError("the parts do not make an archive", evidence=str(error)) from error
    for name, entry in json.loads(held["manifest.json"]).items():
        path = target / name
        if not path.resolve().is_relative_to(target.resolve()):
            raise ModelError(f"the archive holds '{name}', which leaves its directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        data = _put_together(entry, held)
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ModelError(
                f"'{name}' is not what was packed", evidence=f"its digest is not {entry['sha256']}"
            )
        path.write_bytes(data)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    return b"" if stream is None else stream.read()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _taken_apart(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the manifest says of a file, and its pieces by digest.

    An ONNX file becomes its graph and its constants, where putting these together gives the same bytes.
    """
    data = path.read_bytes()
    whole = hashlib.sha256(data).hexdigest()
    if path.suffix == ".onnx":
        model = onnx.ModelProto.FromString(data)
        pieces: dict[str, bytes] = {}
        constants: dict[str, str] = {}
        for number, tensor in _large(model):
            digest = hashlib.sha256(tensor.raw_data).hexdigest()
            pieces[digest] = tensor.raw_data
            constants[str(number)] = digest
            tensor.raw_data = b""
        graph = model.SerializeToString(deterministic=True)
        name = hashlib.sha256(graph).hexdigest()
        entry = {"sha256": whole, "graph": name, "constants": constants}
        pieces[name] = graph
        if _put_together(entry, {f"blobs/{digest}": piece for digest, piece in pieces.items()}) == data:
            return entry, pieces
    return {"sha256": whole, "whole": whole}, {whole: data}


def _large(model: onnx.ModelProto) -> Iterator[tuple[int, onnx.TensorProto]]:
    for number, tensor in enumerate(model.graph.initializer):
        if not uses_external_data(tensor) and len(tensor.raw_data) >= _LEAST_BLOB:
            yield number, tensor


def _put_together(entry: dict[str, Any], held: dict[str, bytes]) -> bytes:
    if "whole" in entry:
        return held[f"blobs/{entry['whole']}"]
    model = onnx.ModelProto.FromString(held[f"blobs/{entry['graph']}"])
    for number, digest in entry["constants"].items():
        model.graph.initializer[int(number)].raw_data = held[f"blobs/{digest}"]
    data: bytes = model.SerializeToString(deterministic=True)
    return data
