"""What lies where in a registry of bundles, and how a place in one is named.

Layout 1, under the URL of the registry::

    blobs/sha256/<digest>.<number>    files of bundles by content, in parts of PART_BYTES; the last is shorter
    bundles/<digest>/manifest.json    the manifest of a bundle; <digest> is the SHA-256 of its bytes
    bundles/<digest>/signature.json   its signature, where it has one
    names/<name>.json                 which bundle a name stands for (`NamePointer`)
    uploads/                          of a registry in a local directory: what is being written

Blobs never change, so that a push sends only what is missing and bundles share what they have in common.
A manifest is written after every blob that it lists, and a pointer after the manifest: whatever is cut off, a
name stands for a whole bundle.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from loka_onnx.core.manifest import MANIFEST_NAME, path_problem
from loka_onnx.core.serde import STRICT
from loka_onnx.errors import ConfigError

PART_BYTES = 16 << 20
"""Size of every part of a blob but its last; belongs to the layout. A part is sent or read in one piece:
small enough to hold several in memory and to lose one, large enough to use a fast line."""

MAX_POINTER_BYTES = 64 << 10
NAMES = "names"
BUNDLES = "bundles"
UPLOADS = "uploads"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIGEST_PREFIX = "sha256:"
_MAX_NAME_CHARACTERS = 100
HIDDEN = "***"


@dataclass(frozen=True)
class NamePointer:
    """Pointer of a name to its bundle.

    Attributes:
        name: The name; a pointer that was copied to another name is noticed.
        manifest: SHA-256 of the bundle's manifest, hexadecimal.
        created_by: Package and version that moved the name.
    """

    SCHEMA: ClassVar[str] = "registry-name/1"
    __pydantic_config__ = STRICT

    name: str
    manifest: str
    created_by: str


@dataclass(frozen=True)
class BlobPart:
    """A piece of a blob, as a registry stores it.

    Attributes:
        key: Where it lies in the registry.
        start: Its first byte within the blob.
        bytes: Its size.
    """

    key: str
    start: int
    bytes: int


@dataclass(frozen=True)
class Reference:
    """A registry, or a bundle in it.

    Attributes:
        url: URL of the registry, with whatever secrets the user put in.
        name: Name of the bundle; None where it is given by its digest, or not at all.
        digest: SHA-256 of its manifest; None where it is given by its name, or not at all.
    """

    url: str
    name: str | None = None
    digest: str | None = None

    @property
    def shown(self) -> str:
        """As it may be printed."""
        which = f"{_DIGEST_PREFIX}{self.digest}" if self.digest else self.name
        return shown_url(self.url) + (f"#{which}" if which else "")


def parse_reference(text: str) -> Reference:
    """Reads ``URL``, ``URL#name`` or ``URL#sha256:<digest of the manifest>``.

    Raises:
        ConfigError: No URL, a chain of file systems, a password that hides where the host begins, or what
            follows ``#`` is neither a name nor a digest.
    """
    _check_password(text)
    url, separator, which = text.partition("#")
    if not url or "::" in url:
        raise ConfigError(
            f"'{shown_url(url)}' is not the URL of a registry",
            evidence="it chains file systems with '::'" if url else "it is empty",
            remedy="give one like s3://bucket/bundles, gs://bucket/bundles or a directory",
        )
    if not separator:
        return Reference(url)
    if which.startswith(_DIGEST_PREFIX):
        digest = which.removeprefix(_DIGEST_PREFIX)
        if not is_digest(digest):
            raise ConfigError(
                f"'{which}' is not a digest",
                where=shown_url(url),
                evidence=f"{len(digest)} characters",
                remedy="give sha256: and 64 hexadecimal digits, as `bundle resolve` prints them",
            )
        return Reference(url, digest=digest)
    check_name(which)
    return Reference(url, name=which)


def check_name(name: str) -> None:
    """Checks that a bundle may have this name in a registry.

    Raises:
        ConfigError: It may not.
    """
    problem = name_problem(name)
    if problem is not None:
        raise ConfigError(
            f"a bundle may not be named '{name[:200]}' in a registry",
            evidence=f"the name {problem}",
            remedy="use letters, digits and ._+=-",
        )


def name_problem(name: str) -> str | None:
    """Why a bundle may not have this name in a registry; None when it may."""
    if len(name) > _MAX_NAME_CHARACTERS:
        return f"is longer than {_MAX_NAME_CHARACTERS} characters"
    for character in "/@":
        # After '#' an '@' could as well end a password.
        if character in name:
            return f"has a '{character}'"
    return path_problem(name)


def is_digest(text: str) -> bool:
    """Whether this is a SHA-256 in lower-case hexadecimal."""
    return _DIGEST.fullmatch(text) is not None


def pointer_key(name: str) -> str:
    """Where the pointer of a name lies."""
    return f"{NAMES}/{name}.json"


def bundle_key(digest: str, file: str = MANIFEST_NAME) -> str:
    """Where a manifest, or another file beside it, lies."""
    return f"{BUNDLES}/{digest}/{file}"


def parts_of(digest: str, size: int) -> Iterator[BlobPart]:
    """The parts of a blob in order; an empty blob has none."""
    for number, start in enumerate(range(0, size, PART_BYTES)):
        yield BlobPart(f"blobs/sha256/{digest}.{number}", start, min(PART_BYTES, size - start))


def shown_url(url: str) -> str:
    """A URL without what may be secret: user, password and query."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    user, place, query = _divided(rest)
    shown = f"{HIDDEN}@{place}" if user else place
    return f"{scheme}://{shown}" + (f"?{HIDDEN}" if query else "")


def without_secrets(text: str, url: str) -> str:
    """Text of an error that a library raised about a URL, without what is secret in the URL."""
    for secret in _secrets(url):
        text = text.replace(secret, HIDDEN).replace(urllib.parse.unquote(secret), HIDDEN)
    return text


def has_secrets(url: str) -> bool:
    """Whether a URL holds anything that must not be printed."""
    return bool(_secrets(url))


def _check_password(text: str) -> None:
    """Refuses a URL whose password may go on after ``#`` or ``?``.

    Raises:
        ConfigError: An ``@`` follows one of them. Nothing of the text is shown: any of it may be secret.
    """
    rest = text.partition("://")[2]
    if "@" in rest[len(re.split("[#?]", rest, maxsplit=1)[0]) :]:
        raise ConfigError(
            "where the host begins in the URL of the registry is not clear",
            evidence="an '@' follows the first '#' or '?'",
            remedy="percent-encode '#' and '?' in passwords (%23, %3F), and '@' in a query (%40)",
        )


def _divided(rest: str) -> tuple[str, str, str]:
    """What follows ``://`` of a URL: user with password, or empty; host and path; query."""
    place, _, query = rest.partition("?")
    if "@" in query:
        # A password that holds a question mark; rather too much is hidden than too little.
        user, _, place = rest.rpartition("@")
        return user, place, ""
    user = _user(place)
    return user, place[len(user) + 1 :] if user else place, query


def _user(place: str) -> str:
    """What stands before the host: ``user:password``, or empty."""
    authority = place.partition("/")[0]
    # Secret keys of object stores hold slashes, and are pasted as they are.
    return (authority if "@" in authority or ":" not in authority else place).rpartition("@")[0]


def _secrets(url: str) -> list[str]:
    """What may be secret in a URL, the longest first, so that no replacement leaves the rest of another."""
    rest = url.partition("://")[2]
    user, query = _divided(rest)[0], rest.partition("?")[2]
    pairs = [pair.partition("=")[2] for pair in query.split("&")]
    found = {user, *user.split(":", 1), query, *pairs}
    return sorted((text for text in found if text), key=len, reverse=True)
