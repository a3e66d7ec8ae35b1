"""Pulling a bundle from a registry to a directory.

Nothing that a registry states is trusted before it is checked: a pointer gives the digest of the manifest;
the manifest must have that digest, be signed where a key is asked for, and list no path that leaves the
bundle; no file is read beyond its listed size. Files that an old bundle has are linked. The new bundle is
staged beside its destination, verified as a loader would, and takes the place of the old one in one step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loka_onnx.bundle.format.archive import add_names, check_room, distinct_files
from loka_onnx.bundle.format.documents import COPY_AGAIN, read_document
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.format.manifest import parse_manifest
from loka_onnx.bundle.format.replace import check_replaceable, staged_directory
from loka_onnx.bundle.format.signature import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_NAME,
    check_signature,
    parse_signature,
)
from loka_onnx.bundle.registry.layout import bundle_key, parse_reference, parts_of
from loka_onnx.bundle.registry.names import resolve_in
from loka_onnx.bundle.registry.store import PUSH_AGAIN, Store, TransferOptions, in_order
from loka_onnx.core.digests import digest_bytes, digest_file
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, BundleFile, Manifest
from loka_onnx.errors import BundleInvalid, LokaError


@dataclass(frozen=True)
class PullResult:
    """Result of a pull: the bundle with links resolved, the digest of its manifest, the key that verified
    (None where none was asked for), and bytes that came from the registry or that the old bundle had.
    """

    directory: Path
    digest: str
    key: str | None
    is_signed: bool
    read_bytes: int
    kept_bytes: int
    is_unchanged: bool


@dataclass(frozen=True)
class _Listed:
    """A checked manifest of a registry, its bytes, its signature and the key that signed it."""

    manifest: Manifest
    text: bytes
    signature: bytes | None
    key: str | None


def pull_bundle(
    place: str, directory: Path, options: TransferOptions | None = None, *, keys: Sequence[Path] = ()
) -> PullResult:
    """Copy a bundle from a registry to a directory; an old bundle there is replaced as a whole.

    `place` is ``URL#name``, or ``URL#sha256:<digest of the manifest>``. With `keys`, one of them must have
    signed it.

    Raises:
        BundleInvalid: The registry holds something else than it states, or no key has signed it.
        UserError: There is no such bundle, or it may not be read.
        OutputError: The directory holds something that is no bundle, or there is no room.
        BundleError: The registry cannot be reached.
    """
    reference, options = parse_reference(place), options or TransferOptions()
    store = Store(reference.url, options)
    destination = Path(os.path.realpath(directory))
    with _named(reference.shown):
        digest = resolve_in(store, reference)
        listed = _listed(store, digest, keys)
        check_replaceable(destination)
        is_unchanged, read, kept = _is_there(destination, listed), 0, listed.manifest.total_bytes
        if not is_unchanged:
            read, kept = _pull(store, listed, destination, options)
    is_signed = listed.signature is not None
    return PullResult(destination, digest, listed.key, is_signed, read, kept, is_unchanged)


@contextlib.contextmanager
def _named(reference: str) -> Iterator[None]:
    """Name the bundle in the registry as the place of an error, and a remedy that helps there."""
    try:
        yield
    except BundleInvalid as error:
        remedy = PUSH_AGAIN if error.remedy == COPY_AGAIN else error.remedy
        raise BundleInvalid(error.coded, where=reference, evidence=error.evidence, remedy=remedy) from error


def _listed(store: Store, digest: str, keys: Sequence[Path]) -> _Listed:
    text = store.need(bundle_key(digest), MAX_MANIFEST_BYTES)
    if digest_bytes(text) != digest:
        evidence = f"sha256 {digest_bytes(text)[:16]}…, asked for {digest[:16]}…"
        raise BundleInvalid(
            "E1217 the manifest in the registry was altered", evidence=evidence, remedy=PUSH_AGAIN
        )
    signature, here = store.read(bundle_key(digest, SIGNATURE_NAME), MAX_SIGNATURE_BYTES), Path(MANIFEST_NAME)
    signer = check_signature(signature, text, keys, here) if keys else None
    if signature is not None:
        parse_signature(signature, text, here)
    return _Listed(parse_manifest(text, here), text, signature, signer)


def _is_there(destination: Path, listed: _Listed) -> bool:
    """Return True if the destination holds this bundle, complete, with this signature."""
    try:
        if read_document(destination, MANIFEST_NAME, MAX_MANIFEST_BYTES) != listed.text:
            return False
        signature = None
        if (destination / SIGNATURE_NAME).exists():
            signature = read_document(destination, SIGNATURE_NAME, MAX_SIGNATURE_BYTES)
        verify_bundle(destination)
    except BundleInvalid:
        return False
    return signature == listed.signature


def _pull(store: Store, listed: _Listed, destination: Path, options: TransferOptions) -> tuple[int, int]:
    """Write the bundle; return bytes that were read, and bytes that the old bundle had."""
    blobs = distinct_files(listed.manifest)
    old = _old_files(destination, {file.sha256 for file in blobs})
    missing = [file for file in blobs if file.sha256 not in old]
    total, done = sum(file.bytes for file in missing), 0
    with staged_directory(destination) as stage:
        check_room(stage, total)
        (stage / MANIFEST_NAME).write_bytes(listed.text)
        if listed.signature is not None:
            (stage / SIGNATURE_NAME).write_bytes(listed.signature)
        parts = (part for file in missing for part in parts_of(file.sha256, file.bytes))
        calls = (partial(store.need, part.key, part.bytes) for part in parts)
        with contextlib.closing(in_order(calls, options.threads)) as contents:
            for file in missing:
                with _target(stage, file).open("xb") as stream:
                    for part in parts_of(file.sha256, file.bytes):
                        data = next(contents)
                        if len(data) != part.bytes:
                            evidence = f"'{part.key}' has {len(data)} bytes of {part.bytes}"
                            what = "a part in the registry is cut short"
                            raise BundleInvalid(
                                f"E1253 {what}", where=store.url, evidence=evidence, remedy=PUSH_AGAIN
                            )
                        done += stream.write(data)
                        options.progress("pull", done, total)
        for file in blobs:
            if file.sha256 in old:
                _link(old[file.sha256], _target(stage, file))
        add_names(stage, listed.manifest)
        verify_bundle(stage)
    return total, sum(file.bytes for file in blobs) - total


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _target(stage: Path, file: BundleFile) -> Path:
    (stage / file.path).parent.mkdir(parents=True, exist_ok=True)
    return stage / file.path


def _old_files(bundle: Path, digests: Collection[str]) -> dict[str, Path]:
    """Files of an old bundle by their digests, of those asked for and unaltered."""
    try:
        old = parse_manifest(read_document(bundle, MANIFEST_NAME, MAX_MANIFEST_BYTES), bundle)
    except LokaError:
        return {}
    files = {}
    for file in old.files:
        path = bundle / file.path
        if file.sha256 not in digests or file.sha256 in files:
            continue
        with contextlib.suppress(OSError):
            status = path.lstat()
            # A link is no file of a bundle, and a link to it would be none either.
            is_whole = stat.S_ISREG(status.st_mode) and status.st_size == file.bytes
            if is_whole and digest_file(path) == file.sha256:
                files[file.sha256] = path
    return files
