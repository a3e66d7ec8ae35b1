"""Layout of a registry of bundles, and references to bundles in it.

Layout 1, under the URL of the registry::

    blobs/sha256/<digest>.<number>    files of bundles by content, in parts of PART_BYTES; the last is shorter
    bundles/<digest>/manifest.json    the manifest of a bundle; <digest> is the SHA-256 of its bytes
    bundles/<digest>/signature.json   its signature, where it has one
    names/<name>.json                 pointer of a name to its bundle (`NamePointer`)
    uploads/                          files being written, in a local directory only

Blobs never change, so a push sends only missing parts and bundles share equal files. A manifest is written
after every blob that it lists, and a pointer after the manifest: an interrupted push leaves every name at a
complete bundle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from loka_onnx.core.manifest import MANIFEST_NAME, path_problem
from loka_onnx.errors import ConfigError

PART_BYTES = 16 << 20
"""Size of every part of a blob but its last; belongs to the layout. A part is sent or read in one request:
small enough to hold several in memory and to lose one, large enough to use a fast line."""

NAMES, BUNDLES, UPLOADS = "names", "bundles", "uploads"
_MAX_NAME_CHARACTERS = 100


@dataclass(frozen=True)
class BlobPart:
    """A part of a blob: its key, its first byte within the blob, and its size in bytes."""

    key: str
    start: int
    bytes: int


@dataclass(frozen=True)
class Reference:
    """A registry (neither name nor digest), or a bundle in it by its name or the SHA-256 of its manifest."""

    url: str
    name: str | None = None
    digest: str | None = None

    @property
    def shown(self) -> str:
        """The reference as it is written."""
        which = f"sha256:{self.digest}" if self.digest else self.name
        return self.url + (f"#{which}" if which else "")


def parse_reference(text: str) -> Reference:
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
        return Reference(url)
    digest = which.removeprefix("sha256:")
    if digest == which:
        check_name(which)
        return Reference(url, name=which)
    if not is_digest(digest):
        remedy = "give sha256: and 64 hexadecimal digits, as `bundle resolve` prints them"
        raise ConfigError(f"E1215 '{which}' is not a digest", where=url, remedy=remedy)
    return Reference(url, digest=digest)


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
