"""Names of a registry: pointers to bundles, which are moved in one step."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar

from loka_onnx.bundle.format.documents import printable
from loka_onnx.bundle.registry.layout import (
    BUNDLES,
    NAMES,
    Reference,
    bundle_key,
    check_name,
    is_digest,
    name_problem,
    parse_reference,
)
from loka_onnx.bundle.registry.store import Store, TransferOptions
from loka_onnx.core import serde
from loka_onnx.errors import BundleInvalid, ConfigError, UserError

MAX_POINTER_BYTES = 64 << 10


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


def resolve(place: str, options: TransferOptions | None = None) -> str:
    """Digest of the manifest of the bundle that ``URL#name`` stands for now; raises as `resolve_in`."""
    reference = parse_reference(place)
    return resolve_in(Store(reference.url, options or TransferOptions()), reference)


def list_names(url: str, options: TransferOptions | None = None) -> tuple[NamedBundle, ...]:
    """Every name of a registry, sorted; `UserError` where nothing was ever pushed."""
    reference = parse_reference(url)
    if reference.shown != reference.url:
        what = "the names of a whole registry are listed"
        remedy = "give the URL alone, or ask for one name with `loka-onnx bundle resolve URL#name`"
        raise ConfigError(
            f"E1249 {what}", where=reference.shown, evidence="the URL names one bundle", remedy=remedy
        )
    store = Store(reference.url, options or TransferOptions())
    files = store.names(NAMES)
    if not files and not store.names(BUNDLES, "directory"):
        evidence = f"there is neither '{NAMES}/' nor '{BUNDLES}/'"
        remedy = "check the URL; the first `loka-onnx bundle push` makes a registry"
        raise UserError("E1216 there is no registry here", where=url, evidence=evidence, remedy=remedy)
    return tuple(_named(store, file.removesuffix(".json")) for file in files if file.endswith(".json"))


def promote(place: str, name: str, options: TransferOptions | None = None) -> str:
    """Point a name at a bundle that a registry has already, and return the digest of its manifest.

    Raises:
        UserError: `name` may not be a name, or there is no such bundle.
        BundleInvalid: The other name's pointer is damaged.
        OutputError: The registry may not be written.
    """
    check_name(name)
    reference = parse_reference(place)
    store = Store(reference.url, options or TransferOptions())
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


def resolve_in(store: Store, reference: Reference) -> str:
    """Digest of the manifest of the bundle of a reference.

    Raises:
        UserError: The reference names no bundle, or the registry has no such name.
        BundleInvalid: The pointer of that name is damaged.
    """
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
