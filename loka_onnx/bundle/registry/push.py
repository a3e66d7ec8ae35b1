"""Pushing: a bundle → a registry.

In this order: every part of every file that the registry lacks, the signature, the manifest, the name.
Whatever ends it, a name stands for the old bundle or for the new one, whole, and the next push sends only the
rest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, NoReturn

from loka_onnx.bundle.registry.layout import (
    BlobPart,
    NamePointer,
    Reference,
    bundle_key,
    parse_reference,
    parts_of,
    pointer_key,
)
from loka_onnx.bundle.registry.store import Store, TransferOptions, in_order
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_bytes
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, BundleFile
from loka_onnx.errors import BundleInvalid, ConfigError
from loka_onnx.sessions.bundle_archive import is_archive, unpacked
from loka_onnx.sessions.bundle_documents import OPEN_PLAIN, read_document
from loka_onnx.sessions.bundle_files import verify_bundle
from loka_onnx.sessions.bundle_signature import MAX_SIGNATURE_BYTES, SIGNATURE_NAME


@dataclass(frozen=True)
class PushResult:
    """Result of a push.

    Attributes:
        digest: SHA-256 of the manifest: what the bundle is called in every registry.
        name: The name that stands for it now; None where none was given.
        sent_parts: Parts that were sent.
        sent_bytes: Their size.
        kept_parts: Parts that the registry had.
        kept_bytes: Their size.
    """

    digest: str
    name: str | None
    sent_parts: int
    sent_bytes: int
    kept_parts: int
    kept_bytes: int


def push_bundle(
    bundle: Path, place: str, options: TransferOptions | None = None, *, again: bool = False
) -> PushResult:
    """Copies a bundle into a registry, and lets a name stand for it.

    Args:
        bundle: Directory of the bundle, or its single-file form.
        place: ``URL`` of the registry, or ``URL#name``.
        options: How to move it.
        again: Send what the registry has as well: where a blob there was damaged without changing its size.

    Returns:
        What was sent, and what was there.

    Raises:
        BundleInvalid: The bundle does not verify, or was altered meanwhile.
        ConfigError: `place` is none that can be pushed to.
        OutputError: The registry may not be written, or has no room.
        BundleError: The registry cannot be reached.
    """
    reference = parse_reference(place)
    if reference.digest is not None:
        raise ConfigError(
            "a bundle cannot be pushed to a digest",
            where=reference.shown,
            evidence="the digest is that of its manifest, whatever it is pushed as",
            remedy="give URL#name, or the URL alone",
        )
    chosen = options or TransferOptions()
    store = Store(reference.url, chosen)
    if is_archive(bundle):
        with unpacked(bundle) as directory:
            return _push(directory, reference, store, chosen, again=again)
    return _push(bundle, reference, store, chosen, again=again)


def write_pointer(store: Store, name: str, digest: str) -> None:
    """Lets a name of a registry stand for a bundle in it, in one step.

    Raises:
        OutputError: The registry may not be written.
        BundleError: It cannot be reached.
    """
    pointer = NamePointer(name, digest, f"loka-onnx {metadata.version('loka-onnx')}")
    store.write(pointer_key(name), serde.dumps(pointer).encode())


def _push(
    directory: Path, reference: Reference, store: Store, options: TransferOptions, *, again: bool
) -> PushResult:
    # Read before the rest is verified against it: what is sent is what was verified.
    text = read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    signature = None
    if (directory / SIGNATURE_NAME).exists():
        signature = read_document(directory, SIGNATURE_NAME, MAX_SIGNATURE_BYTES)
    manifest = verify_bundle(directory)
    if read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES) != text:
        _refuse(directory, MANIFEST_NAME)
    digest = digest_bytes(text)
    store.remove_leftovers()
    blobs = list({file.sha256: file for file in manifest.files}.values())
    parts = [part for file in blobs for part in parts_of(file.sha256, file.bytes)]
    kept = set() if again else _present(store, parts, options.threads)
    total = sum(part.bytes for part in parts if part not in kept)
    sent = 0
    for size in in_order(_sending(store, directory, blobs, kept), options.threads):
        sent += size
        options.progress("push", sent, total)
    if signature is not None:
        store.write(bundle_key(digest, SIGNATURE_NAME), signature)
    store.write(bundle_key(digest), text)
    if reference.name is not None:
        write_pointer(store, reference.name, digest)
    return PushResult(
        digest,
        reference.name,
        sent_parts=len(parts) - len(kept),
        sent_bytes=total,
        kept_parts=len(kept),
        kept_bytes=sum(part.bytes for part in kept),
    )


def _present(store: Store, parts: Sequence[BlobPart], threads: int) -> set[BlobPart]:
    """Parts that the registry has in their size."""
    sizes = in_order((partial(store.size, part.key) for part in parts), threads)
    return {part for part, size in zip(parts, sizes, strict=True) if size == part.bytes}


def _sending(
    store: Store, directory: Path, blobs: Iterable[BundleFile], kept: set[BlobPart]
) -> Iterator[Callable[[], int]]:
    """Calls that send the missing parts, each with the content that the manifest lists."""
    for file in blobs:
        missing = [part for part in parts_of(file.sha256, file.bytes) if part not in kept]
        if not missing:
            continue
        with _opened(directory, file) as stream:
            digests = _part_digests(directory, file, stream)
            for part in missing:
                stream.seek(part.start)
                data = stream.read(part.bytes)
                # A blob is named by its content for ever: what is written to meanwhile must not become one.
                if digest_bytes(data) != digests[part]:
                    _refuse(directory, file.path)
                yield partial(_send, store, part, data)


def _send(store: Store, part: BlobPart, data: bytes) -> int:
    store.write(part.key, data)
    return part.bytes


def _part_digests(directory: Path, file: BundleFile, stream: BinaryIO) -> dict[BlobPart, str]:
    """SHA-256 of each part of a file whose whole is what the manifest lists."""
    state = hashlib.sha256()
    digests = {}
    for part in parts_of(file.sha256, file.bytes):
        data = stream.read(part.bytes)
        state.update(data)
        digests[part] = digest_bytes(data)
    if state.hexdigest() != file.sha256:
        _refuse(directory, file.path)
    return digests


def _opened(directory: Path, file: BundleFile) -> BinaryIO:
    try:
        return os.fdopen(os.open(directory / file.path, OPEN_PLAIN), "rb")
    except OSError as error:
        raise BundleInvalid(
            f"file '{file.path}' cannot be read", where=str(directory), evidence=str(error)
        ) from error


def _refuse(directory: Path, path: str) -> NoReturn:
    raise BundleInvalid(
        f"file '{path}' was altered while it was pushed",
        where=str(directory),
        evidence="it is not what it was when the bundle was verified",
        remedy="push a bundle that nothing writes to; no name was moved",
    )
