"""Pushing a bundle to a registry and pulling it to a directory.

A push sends missing parts, then the signature, the manifest and the name: an interrupted one leaves every
name at a complete bundle, and the next one sends only the rest.

Of a pull, nothing that a registry states is trusted before it is checked: a pointer gives the digest of the
manifest; the manifest must have that digest, be signed where a key is asked for, and list no path that leaves
the bundle; no file is read beyond its listed size. Files that an old bundle has are linked. The new bundle is
staged beside its destination, verified as a loader would, and takes the place of the old one in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from loka_onnx.bundle.format.archive import add_names, as_directory, check_room, distinct_files
from loka_onnx.bundle.format.documents import COPY_AGAIN, OPEN_PLAIN, read_document
from loka_onnx.bundle.format.files import Verified, check_documents, parse_manifest, verify_directory
from loka_onnx.bundle.format.replace import check_replaceable, remove_leftovers, staged_directory
from loka_onnx.bundle.format.signature import MAX_SIGNATURE_BYTES, SIGNATURE_NAME, signature_bytes
from loka_onnx.bundle.registry.names import (
    BlobPart,
    BundleReference,
    bundle_key,
    parse_reference,
    parts_of,
    resolve_in,
    write_pointer,
)
from loka_onnx.bundle.registry.store import PUSH_AGAIN, Store, TransferOptions
from loka_onnx.core.digests import digest_bytes, digest_file
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, BundleFile
from loka_onnx.errors import BundleInvalid, ConfigError, LokaError
from loka_onnx.sessions.runner import map_in_order


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
    """Copy a bundle, a directory or an archive, into a registry, and point a name at it with ``URL#name``.

    `again` sends parts that the registry has as well, to mend one that is damaged but has its size. Raises
    BundleInvalid if the bundle does not verify or was altered meanwhile, ConfigError if `place` is none that
    can be pushed to, OutputError if the registry may not be written or has no room, BundleError if it cannot
    be reached.
    """
    reference = parse_reference(place)
    if reference.digest is not None:
        what, evidence = "a bundle cannot be pushed to a digest", "the digest is that of its manifest"
        remedy = "give URL#name, or the URL alone"
        raise ConfigError(f"E1255 {what}", where=reference.shown, evidence=evidence, remedy=remedy)
    store = Store(reference.url, options)
    with as_directory(bundle) as directory:
        return _push(directory, reference, store, again=again)


def _push(directory: Path, reference: BundleReference, store: Store, *, again: bool) -> PushResult:
    threads = store.options.threads
    verified = verify_directory(directory)
    digest, blobs = digest_bytes(verified.text), distinct_files(verified.manifest)
    parts = [part for file in blobs for part in parts_of(file.sha256, file.bytes)]
    kept: set[BlobPart] = set()
    if not again:
        sizes = map_in_order(store.size, (part.key for part in parts), threads, 1)
        kept = {part for part, size in zip(parts, sizes, strict=True) if size == part.bytes}
    total, sent = sum(part.bytes for part in parts if part not in kept), 0
    for size in map_in_order(lambda send: send(), _sending(store, directory, blobs, kept), threads, 1):
        sent += size
        store.options.progress("push", sent, total)
    if verified.signature is not None:
        store.write(bundle_key(digest, SIGNATURE_NAME), verified.signature)
    store.write(bundle_key(digest), verified.text)
    if reference.name is not None:
        write_pointer(store, reference.name, digest)
    kept_bytes = sum(part.bytes for part in kept)
    return PushResult(digest, reference.name, len(parts) - len(kept), total, len(kept), kept_bytes)


def _sending(
    store: Store, directory: Path, blobs: Iterable[BundleFile], kept: set[BlobPart]
) -> Iterator[Callable[[], int]]:
    """Yield calls that send missing parts of a file, once the whole file is as listed."""
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


def pull_bundle(
    place: str, directory: Path, options: TransferOptions | None = None, *, keys: Sequence[Path] = ()
) -> PullResult:
    """Copy a bundle from a registry to a directory; an old bundle there is replaced as a whole.

    `place` is ``URL#name``, or ``URL#sha256:<digest of the manifest>``. With `keys`, one of them must have
    signed it. Raises BundleInvalid if the registry holds something else than it states, or no key has signed
    it, UserError if there is no such bundle, or it may not be read, OutputError if the directory holds
    something that is no bundle, or there is no room, BundleError if the registry cannot be reached.
    """
    reference = parse_reference(place)
    store = Store(reference.url, options)
    destination = Path(os.path.realpath(directory))
    try:
        digest = resolve_in(store, reference)
        listed = _listed(store, digest, keys)
        check_replaceable(destination)
        is_unchanged, read, kept = _is_there(destination, listed), 0, listed.manifest.total_bytes
        if is_unchanged:
            remove_leftovers(destination)
        else:
            read, kept = _pull(store, listed, destination)
    except BundleInvalid as error:
        remedy = PUSH_AGAIN if error.remedy == COPY_AGAIN else error.remedy
        error.restate(where=reference.shown, remedy=remedy)
        raise
    is_signed = listed.signature is not None
    return PullResult(destination, digest, listed.signer, is_signed, read, kept, is_unchanged)


def _listed(store: Store, digest: str, keys: Sequence[Path]) -> Verified:
    """Documents of a bundle in a registry, checked."""
    text = store.need(bundle_key(digest), MAX_MANIFEST_BYTES)
    if digest_bytes(text) != digest:
        evidence = f"sha256 {digest_bytes(text)[:16]}…, asked for {digest[:16]}…"
        raise BundleInvalid(
            "E1217 the manifest in the registry was altered", evidence=evidence, remedy=PUSH_AGAIN
        )
    signature = store.read(bundle_key(digest, SIGNATURE_NAME), MAX_SIGNATURE_BYTES)
    return check_documents(text, signature, keys, Path(MANIFEST_NAME))


def _is_there(destination: Path, listed: Verified) -> bool:
    """Return True if the destination holds this bundle, complete, with this signature."""
    try:
        if read_document(destination, MANIFEST_NAME, MAX_MANIFEST_BYTES) != listed.text:
            return False
        signature = signature_bytes(destination)
        verify_directory(destination)
    except BundleInvalid:
        return False
    return signature == listed.signature


def _pull(store: Store, listed: Verified, destination: Path) -> tuple[int, int]:
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
        read = map_in_order(lambda p: store.need(p.key, p.bytes), parts, store.options.threads, 1)
        with contextlib.closing(read) as contents:
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
                        store.options.progress("pull", done, total)
        for file in blobs:
            if file.sha256 in old:
                target = _target(stage, file)
                try:
                    target.hardlink_to(old[file.sha256])
                except OSError:
                    shutil.copyfile(old[file.sha256], target)
        add_names(stage, listed.manifest)
        verify_directory(stage)
    return total, sum(file.bytes for file in blobs) - total


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
