"""Names of a registry: what they stand for, and letting them stand for another bundle."""

from __future__ import annotations

from dataclasses import dataclass

from loka_onnx.bundle.registry.layout import (
    BUNDLES,
    MAX_POINTER_BYTES,
    NAMES,
    bundle_key,
    check_name,
    name_problem,
    parse_reference,
    pointer_key,
)
from loka_onnx.bundle.registry.pull import read_pointer, resolve_in
from loka_onnx.bundle.registry.push import write_pointer
from loka_onnx.bundle.registry.store import Store, TransferOptions
from loka_onnx.errors import ConfigError, LokaError, UserError


@dataclass(frozen=True)
class NamedBundle:
    """A name of a registry.

    Attributes:
        name: The name.
        digest: SHA-256 of the manifest of the bundle that it stands for; None where its pointer is damaged,
            or it may not be a name.
        problem: What is wrong with its pointer, or with the name; empty where nothing is.
    """

    name: str
    digest: str | None
    problem: str = ""


def resolve(place: str, options: TransferOptions | None = None) -> str:
    """Digest of the manifest of the bundle that ``URL#name`` stands for now.

    Raises:
        UserError: There is no such bundle.
        BundleInvalid: What lies there is no pointer of that name.
        BundleError: The registry cannot be reached.
    """
    reference = parse_reference(place)
    return resolve_in(Store(reference.url, options or TransferOptions()), reference)


def list_names(url: str, options: TransferOptions | None = None) -> tuple[NamedBundle, ...]:
    """Every name of a registry, sorted.

    Raises:
        ConfigError: The URL names a bundle.
        UserError: Nothing was ever pushed there.
        BundleError: The registry cannot be reached.
    """
    reference = parse_reference(url)
    if reference.name is not None or reference.digest is not None:
        raise ConfigError(
            "the names of a whole registry are listed",
            where=reference.shown,
            evidence="the URL names one bundle after '#'",
            remedy="give the URL alone, or ask for one name with `loka-onnx bundle resolve URL#name`",
        )
    store = Store(reference.url, options or TransferOptions())
    files = store.names(NAMES)
    if not files and not store.holds(BUNDLES):
        raise UserError(
            "there is no registry here",
            where=store.shown,
            evidence=f"there is neither '{NAMES}/' nor '{BUNDLES}/'",
            remedy="check the URL; the first `loka-onnx bundle push` makes a registry",
        )
    return tuple(_named(store, file.removesuffix(".json")) for file in files if file.endswith(".json"))


def promote(place: str, name: str, options: TransferOptions | None = None) -> str:
    """Lets a name stand for a bundle that a registry has already; moves nothing else.

    Args:
        place: The bundle: ``URL#other-name`` or ``URL#sha256:<digest of the manifest>``.
        name: The name.
        options: How to reach the registry.

    Returns:
        Digest of the manifest.

    Raises:
        ConfigError: It may not be a name.
        UserError: There is no such bundle.
        BundleInvalid: The other name's pointer is damaged.
        OutputError: The registry may not be written.
        BundleError: It cannot be reached.
    """
    check_name(name)
    reference = parse_reference(place)
    store = Store(reference.url, options or TransferOptions())
    digest = resolve_in(store, reference)
    if store.size(bundle_key(digest)) is None:
        raise UserError(
            "the registry has no bundle of this digest",
            where=reference.shown,
            evidence=f"there is no '{bundle_key(digest)}'",
            remedy="push it",
        )
    write_pointer(store, name, digest)
    return digest


def _named(store: Store, name: str) -> NamedBundle:
    problem = name_problem(name)
    if problem is not None:
        return NamedBundle(name, None, f"the name {problem}")
    data = store.read(pointer_key(name), MAX_POINTER_BYTES + 1)
    if data is None:
        return NamedBundle(name, None, "it was removed just now")
    try:
        return NamedBundle(name, read_pointer(data, name, store.shown).manifest)
    except LokaError as error:
        return NamedBundle(name, None, error.what)
