"""Pushing a bundle to a registry: missing parts, then the signature, the manifest and the name.

An interrupted push leaves every name at a complete bundle, and the next one sends only the rest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from loka_onnx.bundle.format.archive import as_directory
from loka_onnx.bundle.format.documents import OPEN_PLAIN, read_document
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.format.signature import MAX_SIGNATURE_BYTES, SIGNATURE_NAME
from loka_onnx.bundle.registry.layout import BlobPart, Reference, bundle_key, parse_reference, parts_of
from loka_onnx.bundle.registry.names import write_pointer
from loka_onnx.bundle.registry.store import Store, TransferOptions, in_order
from loka_onnx.core.digests import digest_bytes
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, BundleFile
from loka_onnx.errors import BundleInvalid, ConfigError


@dataclass(frozen=True)
class PushResult:
    """Result of a push: digest of the manifest, the name it was pushed to, parts sent and parts kept."""

    digest: str
    name: str | None
    sent_parts: int
    sent_bytes: int
    kept_parts: int
    kept_bytes: int


def push_bundle(
    bundle: Path, place: str, options: TransferOptions | None = None, *, again: bool = False
) -> PushResult:
    """Copy a bundle, a directory or an archive, into the registry ``URL``, and point a name at it with
    ``URL#name``.

    `again` sends parts that the registry has as well, to mend one that is damaged but has its size.

    Raises:
        BundleInvalid: The bundle does not verify, or was altered meanwhile.
        ConfigError: `place` is none that can be pushed to.
        OutputError: The registry may not be written, or has no room.
        BundleError: The registry cannot be reached.
    """
    reference = parse_reference(place)
    if reference.digest is not None:
        what, evidence = "a bundle cannot be pushed to a digest", "the digest is that of its manifest"
        remedy = "give URL#name, or the URL alone"
        raise ConfigError(f"E1255 {what}", where=reference.shown, evidence=evidence, remedy=remedy)
    options = options or TransferOptions()
    store = Store(reference.url, options)
    with as_directory(bundle) as directory:
        return _push(directory, reference, store, options, again=again)


def _push(
    directory: Path, reference: Reference, store: Store, options: TransferOptions, *, again: bool
) -> PushResult:
    text = read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    signature = None
    if (directory / SIGNATURE_NAME).exists():
        signature = read_document(directory, SIGNATURE_NAME, MAX_SIGNATURE_BYTES)
    manifest = verify_bundle(directory)
    if read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES) != text:
        _refuse(directory, MANIFEST_NAME)
    digest = digest_bytes(text)
    blobs = {file.sha256: file for file in manifest.files}.values()
    parts = [part for file in blobs for part in parts_of(file.sha256, file.bytes)]
    kept = set() if again else _present(store, parts, options.threads)
    total, sent = sum(part.bytes for part in parts if part not in kept), 0
    for size in in_order(_sending(store, directory, blobs, kept), options.threads):
        sent += size
        options.progress("push", sent, total)
    if signature is not None:
        store.write(bundle_key(digest, SIGNATURE_NAME), signature)
    store.write(bundle_key(digest), text)
    if reference.name is not None:
        write_pointer(store, reference.name, digest)
    kept_bytes = sum(part.bytes for part in kept)
    return PushResult(digest, reference.name, len(parts) - len(kept), total, len(kept), kept_bytes)


def _present(store: Store, parts: Sequence[BlobPart], threads: int) -> set[BlobPart]:
    """Parts that the registry has in their size."""
    sizes = in_order((partial(store.size, part.key) for part in parts), threads)
    return {part for part, size in zip(parts, sizes, strict=True) if size == part.bytes}


def _sending(
    store: Store, directory: Path, blobs: Iterable[BundleFile], kept: set[BlobPart]
) -> Iterator[Callable[[], int]]:
    """Yield calls that send missing parts of a file, once the whole file is as listed: a blob never
    changes.
    """
    for file in blobs:
        digests, state = {}, hashlib.sha256()
        if kept.issuperset(parts_of(file.sha256, file.bytes)):
            continue
        for part in parts_of(file.sha256, file.bytes):
            data = _read(directory, file, part)
            state.update(data)
            digests[part] = digest_bytes(data)
        if state.hexdigest() != file.sha256:
            _refuse(directory, file.path)
        for part in (part for part in digests if part not in kept):
            yield partial(_send, store, directory, file, part, digests[part])


def _send(store: Store, directory: Path, file: BundleFile, part: BlobPart, digest: str) -> int:
    data = _read(directory, file, part)
    if digest_bytes(data) != digest:
        _refuse(directory, file.path)
    store.write(part.key, data)
    return part.bytes


def _read(directory: Path, file: BundleFile, part: BlobPart) -> bytes:
    try:
        with os.fdopen(os.open(directory / file.path, OPEN_PLAIN), "rb") as stream:
            stream.seek(part.start)
            return stream.read(part.bytes)
    except OSError as error:
        what = f"file '{file.path}' cannot be read"
        raise BundleInvalid(f"E1256 {what}", where=str(directory), evidence=str(error)) from error


def _refuse(directory: Path, path: str) -> NoReturn:
    what = f"file '{path}' was altered while it was pushed"
    evidence = "it is not what it was when the bundle was verified"
    remedy = "push a bundle that nothing writes to; no name was moved"
    raise BundleInvalid(f"E1254 {what}", where=str(directory), evidence=evidence, remedy=remedy)
