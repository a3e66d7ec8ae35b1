"""Pulling: a registry → a bundle in a directory.

Nothing that a registry says is trusted before it is checked. The pointer of a name gives the digest of the
manifest. The manifest must have that digest, be signed where a key is asked for, and name no path that leaves
the bundle. No file is read beyond the size that the manifest lists, and each must have the digest that it
lists. The bundle is then verified as a loader would, and takes the place of an old one in one step.

An interrupted pull goes on where it stopped (`bundle.registry.arrivals`). Files that the old bundle has are
not read again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.bundle.registry.arrivals import (
    PUSH_AGAIN,
    Arrivals,
    arrivals_beside,
    link_or_copy,
    refuse_registry,
)
from loka_onnx.bundle.registry.layout import (
    MAX_POINTER_BYTES,
    NamePointer,
    Reference,
    bundle_key,
    is_digest,
    parse_reference,
    pointer_key,
)
from loka_onnx.bundle.registry.store import Store, TransferOptions
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_bytes
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from loka_onnx.errors import BundleInvalid, ConfigError, OutputError, UserError
from loka_onnx.sessions.bundle_documents import printable, read_document
from loka_onnx.sessions.bundle_files import verify_bundle
from loka_onnx.sessions.bundle_manifest import parse_manifest
from loka_onnx.sessions.bundle_signature import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_NAME,
    check_signature,
    parse_signature,
)
from loka_onnx.sessions.replace import check_replaceable, staged_directory


@dataclass(frozen=True)
class PullResult:
    """Result of a pull.

    Attributes:
        directory: The bundle, with links resolved.
        digest: SHA-256 of its manifest.
        key: Fingerprint of the key that its signature verified with; None where no key was asked for.
        is_signed: Whether there is a signature at all.
        read_bytes: What came from the registry, beside the manifest.
        kept_bytes: What the old bundle, or an interrupted pull, had.
        is_unchanged: The bundle was there already, whole; nothing was written.
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
    """What a registry says of a bundle, checked."""

    shown: str
    digest: str
    manifest: Manifest
    text: bytes
    signature: bytes | None
    key: str | None


def pull_bundle(
    place: str, directory: Path, options: TransferOptions | None = None, *, keys: Sequence[Path] = ()
) -> PullResult:
    """Copies a bundle from a registry to a directory; an old bundle there is replaced as a whole.

    Args:
        place: ``URL#name``, or ``URL#sha256:<digest of the manifest>``.
        directory: Where it goes.
        options: How to move it.
        keys: Public keys; one of them must have signed it. None: the signature, if any, is not checked.

    Returns:
        What was read, and what was there.

    Raises:
        BundleInvalid: The registry holds something else than it says, or no key has signed it.
        UserError: There is no such bundle, or it may not be read.
        OutputError: The directory holds something that is no bundle, or there is no room.
        BundleError: The registry cannot be reached, or another pull writes to the same place.
    """
    reference = parse_reference(place)
    chosen = options or TransferOptions()
    store = Store(reference.url, chosen)
    digest = resolve_in(store, reference)
    listed = _listed(store, reference, digest, keys)
    destination = Path(os.path.realpath(directory))
    check_replaceable(destination)
    if _is_there(destination, listed):
        return PullResult(
            destination,
            digest,
            listed.key,
            listed.signature is not None,
            read_bytes=0,
            kept_bytes=listed.manifest.total_bytes,
            is_unchanged=True,
        )
    try:
        return _pull(store, listed, destination, chosen)
    except OSError as error:
        raise OutputError(
            f"cannot write '{destination}'",
            evidence=str(error),
            remedy="choose a place that can be written and has room; the next pull goes on with what arrived",
        ) from error


def resolve_in(store: Store, reference: Reference) -> str:
    """Digest of the manifest of the bundle that a reference means.

    Raises:
        ConfigError: The reference means no bundle.
        UserError: The registry has no such name.
        BundleInvalid: What lies there is no pointer of that name.
        BundleError: The registry cannot be reached.
    """
    if reference.digest is not None:
        return reference.digest
    if reference.name is None:
        raise ConfigError(
            f"'{reference.shown}' does not say which bundle",
            evidence="a registry holds many",
            remedy="give URL#name or URL#sha256:<digest>; `loka-onnx bundle list URL` shows the names",
        )
    data = store.read(pointer_key(reference.name), MAX_POINTER_BYTES + 1)
    if data is None:
        raise UserError(
            f"the registry has no bundle '{reference.name}'",
            where=store.shown,
            evidence=f"there is no '{pointer_key(reference.name)}'",
            remedy="`loka-onnx bundle list URL` shows the names",
        )
    return read_pointer(data, reference.name, reference.shown).manifest


def read_pointer(data: bytes, name: str, where: str) -> NamePointer:
    """The pointer of a name, from the first `MAX_POINTER_BYTES` + 1 bytes of its file.

    Raises:
        BundleInvalid: It is too large, no pointer, of another name, or points at no digest.
    """
    remedy = "push the bundle again under this name"
    if len(data) > MAX_POINTER_BYTES:
        evidence = f"the limit is {MAX_POINTER_BYTES} bytes"
        raise BundleInvalid(
            "the pointer of the name is too large", where=where, evidence=evidence, remedy=remedy
        )
    try:
        pointer = serde.loads(NamePointer, data.decode("utf-8"), where=where)
    except (UserError, ValueError, RecursionError) as error:
        evidence = printable(error.evidence if isinstance(error, UserError) else str(error))
        what = f"the pointer of name '{name}' is not a {serde.schema_id(NamePointer)} document"
        raise BundleInvalid(what, where=where, evidence=evidence, remedy=remedy) from error
    if pointer.name != name:
        raise BundleInvalid(
            f"the pointer of name '{name}' was made for another name",
            where=where,
            evidence=f"it says '{printable(pointer.name[:100])}'",
            remedy=f"find out who swapped them; {remedy}",
        )
    if not is_digest(pointer.manifest):
        evidence = f"it says '{printable(pointer.manifest[:80])}'"
        what = f"the pointer of name '{name}' does not hold a digest"
        raise BundleInvalid(what, where=where, evidence=evidence, remedy=remedy)
    return pointer


def _listed(store: Store, reference: Reference, digest: str, keys: Sequence[Path]) -> _Listed:
    shown = reference.shown
    text = store.read(bundle_key(digest), MAX_MANIFEST_BYTES + 1)
    if text is None:
        refuse_registry(
            shown, "the manifest is missing in the registry", f"there is no '{bundle_key(digest)}'"
        )
    if len(text) > MAX_MANIFEST_BYTES:
        refuse_registry(
            shown, "the manifest in the registry is too large", f"the limit is {MAX_MANIFEST_BYTES} bytes"
        )
    found = digest_bytes(text)
    if found != digest:
        refuse_registry(
            shown,
            "the manifest in the registry was altered",
            f"sha256 {found[:16]}…, asked for {digest[:16]}…",
        )
    signature = store.read(bundle_key(digest, SIGNATURE_NAME), MAX_SIGNATURE_BYTES + 1)
    if signature is not None and len(signature) > MAX_SIGNATURE_BYTES:
        refuse_registry(
            shown, "the signature in the registry is too large", f"the limit is {MAX_SIGNATURE_BYTES} bytes"
        )
    here = Path(MANIFEST_NAME)
    try:
        key = check_signature(signature, text, keys, here) if keys else None
        if signature is not None:
            parse_signature(signature, text, here)
        manifest = parse_manifest(text, here)
    except BundleInvalid as error:
        raise BundleInvalid(error.what, where=shown, evidence=error.evidence, remedy=error.remedy) from error
    return _Listed(shown, digest, manifest, text, signature, key)


def _pull(store: Store, listed: _Listed, destination: Path, options: TransferOptions) -> PullResult:
    blobs = {file.sha256: file for file in listed.manifest.files}
    total = sum(file.bytes for file in blobs.values())
    with arrivals_beside(destination) as folder:
        arrived = Arrivals(folder, listed.shown)
        arrived.forget_others(blobs)
        arrived.take_over(blobs, destination)
        kept = total - arrived.check_room(blobs)
        read = 0
        missing = [file for digest, file in sorted(blobs.items()) if not arrived.has(digest)]
        # What one damaged blob leaves of the others is what the next pull goes on with.
        for size in arrived.fetch(store, missing, options.threads):
            read += size
            options.progress("pull", min(total, kept + read), total)
        try:
            with staged_directory(destination) as stage:
                _lay_out(listed, folder, stage)
        except BundleInvalid:
            # Every file is what the manifest lists, and they make no bundle: fetching more would not help.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
    return PullResult(
        destination,
        listed.digest,
        listed.key,
        listed.signature is not None,
        read_bytes=read,
        kept_bytes=kept,
        is_unchanged=False,
    )


def _lay_out(listed: _Listed, folder: Path, stage: Path) -> None:
    """Puts what has arrived where the manifest lists it."""
    (stage / MANIFEST_NAME).write_bytes(listed.text)
    if listed.signature is not None:
        (stage / SIGNATURE_NAME).write_bytes(listed.signature)
    for file in listed.manifest.files:
        target = stage / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(folder / file.sha256, target)
    try:
        verify_bundle(stage)
    except BundleInvalid as error:
        raise BundleInvalid(
            error.what, where=listed.shown, evidence=error.evidence, remedy=PUSH_AGAIN
        ) from error


def _is_there(destination: Path, listed: _Listed) -> bool:
    """Whether the destination holds this bundle, whole, with this signature."""
    try:
        if read_document(destination, MANIFEST_NAME, MAX_MANIFEST_BYTES) != listed.text:
            return False
        signature = None
        if (destination / SIGNATURE_NAME).exists():
            signature = read_document(destination, SIGNATURE_NAME, MAX_SIGNATURE_BYTES)
        if signature != listed.signature:
            return False
        verify_bundle(destination)
    except BundleInvalid:
        return False
    return True
