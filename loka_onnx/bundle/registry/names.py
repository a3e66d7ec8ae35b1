"""Layout of a registry of bundles, references to bundles in it, and names, which are moved in one step.

Layout 1, under the URL of the registry::

    blobs/sha256/<digest>.<number>    files of bundles by content, in parts of PART_BYTES; the last is shorter
    bundles/<digest>/manifest.json    the manifest of a bundle; <digest> is the SHA-256 of its bytes
    bundles/<digest>/signature.json   its signature, where it has one
    names/<name>.json                 pointer of a name to its bundle (`NamePointer`)
    uploads/                          files being written, in a local directory only

Blobs never change, so a push sends only missing parts and bundles share equal files. A manifest is written
after every blob that it lists, and a pointer after the manifest: after an interruption every name has a whole
bundle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar

from loka_onnx.bundle.format.documents import printable
from loka_onnx.bundle.registry.store import Store, TransferOptions
from loka_onnx.core import serde
from loka_onnx.core.manifest import MANIFEST_NAME, path_problem
from loka_onnx.errors import BundleInvalid, ConfigError, UserError

PART_BYTES = 16 << 20
"""Size of every part of a blob but its last; belongs to the layout. A part is sent or read in one request:
small enough to hold several in memory and to lose one, large enough to use a fast line."""

NAMES, BUNDLES = "names", "bundles"
MAX_POINTER_BYTES = 64 << 10
_MAX_NAME_CHARACTERS = 100


@dataclass(frozen=True)
class BlobPart:
    """A part of a blob: its key, its first byte within the blob, and its size in bytes."""

    key: str
    start: int
    bytes: int


@dataclass(frozen=True)
class BundleReference:
    """A registry (neither name nor digest), or a bundle in it by its name or the SHA-256 of its manifest."""

    url: str
    name: str | None = None
    digest: str | None = None

    @property
    def shown(self) -> str:
        """The reference as it is written."""
        which = f"sha256:{self.digest}" if self.digest else self.name
        return self.url + (f"#{which}" if which else "")


@dataclass(frozen=True)
class NamePointer:
    """Pointer of a name to the SHA-256 of a manifest; it holds its name, so that a copied one is noticed."""

    SCHEMA: ClassVar[str] = "registry-name/1"
    __pydantic_config__ = serde.STRICT

    name: str
    manifest: str
    created_by: str


@dataclass(frozen=True)
class NamedBundle:
    """A name of a registry, and the SHA-256 of the manifest of its bundle or the `problem` of the pointer."""

    name: str
    digest: str | None
    problem: str = ""


def parse_reference(text: str) -> BundleReference:
    """Read ``URL``, ``URL#name`` or ``URL#sha256:<digest of the manifest>``; `ConfigError` for others."""
    if re.search(r"://([^/]*:.*@|.*\?)", text, re.DOTALL):
        # Nothing of the text is shown: any of it may be secret.
        raise ConfigError(
            "E1213 the URL of a registry may hold neither a password nor a query",
            evidence="a ':' stands before an '@', or there is a '?'",
            remedy="give credentials where the file system looks for them, as AWS_PROFILE or "
            "GOOGLE_APPLICATION_CREDENTIALS, or as fsspec's FSSPEC_<PROTOCOL>_PASSWORD",
        )
    url, separator, which = text.partition("#")
    if not url or "::" in url:
        evidence = "it chains file systems with '::'" if url else "it is empty"
        remedy = "give one like s3://bucket/bundles, gs://bucket/bundles or a directory"
        raise ConfigError(f"E1214 '{url}' is not the URL of a registry", evidence=evidence, remedy=remedy)
    if not separator:
        return BundleReference(url)
    digest = which.removeprefix("sha256:")
    if digest == which:
        check_name(which)
        return BundleReference(url, name=which)
    if not is_digest(digest):
        remedy = "give sha256: and 64 hexadecimal digits, as `bundle resolve` prints them"
        raise ConfigError(f"E1215 '{which}' is not a digest", where=url, remedy=remedy)
    return BundleReference(url, digest=digest)


def check_name(name: str) -> None:
    """Raise `ConfigError` if a bundle may not have this name in a registry."""
    problem = name_problem(name)
    if problem is not None:
        what, evidence = f"a bundle may not be named '{name[:200]}' in a registry", f"the name {problem}"
        raise ConfigError(f"E1247 {what}", evidence=evidence, remedy="use letters, digits and ._+=-")


def name_problem(name: str) -> str | None:
    """Return why a bundle may not have this name in a registry; None when it may."""
    if len(name) > _MAX_NAME_CHARACTERS:
        return f"is longer than {_MAX_NAME_CHARACTERS} characters"
    # After '#' an '@' could as well end a password.
    forbidden = next((character for character in "/@" if character in name), None)
    return path_problem(name) if forbidden is None else f"has a '{forbidden}'"


def is_digest(text: str) -> bool:
    """Return True for a SHA-256 in lower-case hexadecimal."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def bundle_key(digest: str, file: str = MANIFEST_NAME) -> str:
    """Key of a manifest, or of another file beside it."""
    return f"{BUNDLES}/{digest}/{file}"


def parts_of(digest: str, size: int) -> Iterator[BlobPart]:
    """Yield the parts of a blob in order; an empty blob has none."""
    for number, start in enumerate(range(0, size, PART_BYTES)):
        yield BlobPart(f"blobs/sha256/{digest}.{number}", start, min(PART_BYTES, size - start))


def resolve(place: str, options: TransferOptions | None = None) -> str:
    """Digest of the manifest of the bundle that ``URL#name`` stands for now; raises as `resolve_in`."""
    reference = parse_reference(place)
    return resolve_in(Store(reference.url, options), reference)


def list_names(url: str, options: TransferOptions | None = None) -> tuple[NamedBundle, ...]:
    """Every name of a registry, sorted; `UserError` where nothing was ever pushed."""
    reference = parse_reference(url)
    if reference.shown != reference.url:
        what = "the names of a whole registry are listed"
        remedy = "give the URL alone, or ask for one name with `loka-onnx bundle resolve URL#name`"
        raise ConfigError(
            f"E1249 {what}", where=reference.shown, evidence="the URL names one bundle", remedy=remedy
        )
    store = Store(reference.url, options)
    files = store.names(NAMES)
    if not files and not store.names(BUNDLES, "directory"):
        evidence = f"there is neither '{NAMES}/' nor '{BUNDLES}/'"
        remedy = "check the URL; the first `loka-onnx bundle push` makes a registry"
        raise UserError("E1216 there is no registry here", where=url, evidence=evidence, remedy=remedy)
    return tuple(_named(store, file.removesuffix(".json")) for file in files if file.endswith(".json"))


def promote(place: str, name: str, options: TransferOptions | None = None) -> str:
    """Point a name at a bundle that a registry has already, and return the digest of its manifest. Raises
    UserError if `name` may not be a name, or there is no such bundle, BundleInvalid if the other name's
    pointer is damaged, OutputError if the registry may not be written.
    """
    check_name(name)
    reference = parse_reference(place)
    store = Store(reference.url, options)
    digest = resolve_in(store, reference)
    if store.size(bundle_key(digest)) is None:
        what, evidence = "the registry has no bundle of this digest", f"there is no '{bundle_key(digest)}'"
        raise UserError(f"E1250 {what}", where=reference.shown, evidence=evidence, remedy="push it")
    write_pointer(store, name, digest)
    return digest


def write_pointer(store: Store, name: str, digest: str) -> None:
    """Point a name at a bundle, in one step."""
    pointer = NamePointer(name, digest, f"loka-onnx {metadata.version('loka-onnx')}")
    store.write(_key(name), serde.dumps(pointer).encode())


def resolve_in(store: Store, reference: BundleReference) -> str:
    """Digest of a reference's manifest; UserError without one, BundleInvalid for a damaged pointer."""
    if reference.digest is not None:
        return reference.digest
    remedy = "give URL#name or URL#sha256:<digest>; `loka-onnx bundle list URL` shows the names"
    if reference.name is None:
        what = f"'{reference.url}' does not say which bundle"
        raise ConfigError(f"E1251 {what}", evidence="a registry holds many", remedy=remedy)
    digest = _pointed(store, reference.name)
    if digest is None:
        what, evidence = f"the registry has no bundle '{reference.name}'", f"no '{_key(reference.name)}'"
        raise UserError(f"E1252 {what}", where=store.url, evidence=evidence, remedy=remedy)
    return digest


def _pointed(store: Store, name: str) -> str | None:
    """Digest in the pointer of a name, None where there is no pointer; `BundleInvalid` if it is damaged."""
    data = store.read(_key(name), MAX_POINTER_BYTES)
    if data is None:
        return None
    try:
        pointer = serde.loads(NamePointer, data.decode("utf-8"), where=store.url)
    except (UserError, ValueError, RecursionError) as error:
        what = f"the pointer of name '{name}' is not a {serde.schema_id(NamePointer)} document"
        evidence = error.evidence if isinstance(error, UserError) else str(error)
    else:
        if pointer.name == name and is_digest(pointer.manifest):
            return pointer.manifest
        what = f"the pointer of name '{name}' is of another name, or does not hold a digest"
        evidence = f"it says '{pointer.name[:100]}' and '{pointer.manifest[:80]}'"
    remedy = "find out who wrote it, and push the bundle again under this name"
    raise BundleInvalid(
        f"E1248 {what}", where=f"{store.url}#{name}", evidence=printable(evidence), remedy=remedy
    )


def _named(store: Store, name: str) -> NamedBundle:
    problem = name_problem(name)
    if problem is not None:
        return NamedBundle(name, None, f"the name {problem}")
    try:
        digest = _pointed(store, name)
    except BundleInvalid as error:
        return NamedBundle(name, None, error.what)
    return NamedBundle(name, digest, "" if digest else "it was removed just now")


def _key(name: str) -> str:
    return f"{NAMES}/{name}.json"
