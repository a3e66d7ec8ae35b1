"""Files of a registry under keys, through fsspec, whose file systems repeat calls that a network failed."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from loka_onnx.bundle.format.documents import printable
from loka_onnx.bundle.format.replace import staged_file
from loka_onnx.core.progress import Progress, silent
from loka_onnx.errors import BundleError, BundleInvalid, LokaError, MissingPackage, OutputError, UserError

T = TypeVar("T")

_NETWORK = frozenset(
    {errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET}
)
"""Numbers of errors that a network makes, not the place that is written."""
UPLOADS = "uploads"
"""Folder of a local registry with files that are being written."""
PUSH_AGAIN = "push the bundle again with --again, from where it verifies"


@dataclass(frozen=True)
class TransferOptions:
    """Options of moving bundles: parts under way at once, each with `names.PART_BYTES` of memory; fsspec's
    `storage_options`; a function that is called with bytes done and to do.
    """

    threads: int = 8
    storage: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = silent

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UserError(
                "E1218 parts are moved by one thread at least", evidence=f"threads: {self.threads}"
            )


class Store:
    """Files under a URL that fsspec opens, or in a local directory; may be used from several threads.
    BundleError if the registry cannot be reached, UserError without the right, or for another URL.
    """

    def __init__(self, url: str, options: TransferOptions | None) -> None:
        self.url, self.options = url, options or TransferOptions()
        with (
            MissingPackage(
                f"E1259 '{url}' needs a package that is not installed",
                remedy="pip install 'loka-onnx[registry]', s3fs for s3://, gcsfs for gs://, adlfs for az://",
            ).in_place_of(ImportError),
            UserError(
                f"E1260 '{url}' cannot be opened",
                remedy="give a URL that fsspec knows, like s3://, gs://, az:// or file://",
            ).in_place_of(ValueError, TypeError, OSError, words=lambda error: printable(str(error))),
        ):
            import fsspec.core
            from fsspec.implementations.local import LocalFileSystem

            self._fs, root = fsspec.core.url_to_fs(url, **self.options.storage)
        self._root = str(root).rstrip("/")
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def size(self, key: str) -> int | None:
        """Size in bytes of the file under a key; None where there is none."""
        info = self._tried(self._fs.info, f"look up '{key}' in", key)
        return info["size"] if info and info["type"] == "file" else None

    def read(self, key: str, limit: int) -> bytes | None:
        """The file under a key, None where there is none; `BundleInvalid` beyond `limit` bytes."""

        def ask(path: str) -> bytes:
            if self._is_local and Path(path).exists() and not Path(path).is_file():
                # Opening a pipe would wait for its writer.
                raise OSError(errno.EINVAL, "not a plain file", key)
            data = bytearray()
            with self._fs.open(path, "rb", cache_type="none") as stream:
                while len(data) <= limit and (chunk := stream.read(limit + 1 - len(data))):
                    data += chunk
            return bytes(data)

        data = self._tried(ask, f"read '{key}' from", key)
        if data is not None and len(data) > limit:
            what, evidence = f"'{key}' in the registry is too large", f"the limit is {limit:,} bytes"
            raise BundleInvalid(f"E1257 {what}", where=self.url, evidence=evidence, remedy=PUSH_AGAIN)
        return data

    def need(self, key: str, limit: int) -> bytes:
        """The file under a key, as `read`; `BundleInvalid` where there is none."""
        data = self.read(key, limit)
        if data is None:
            what = f"'{key}' is missing in the registry"
            raise BundleInvalid(f"E1258 {what}", where=self.url, remedy=PUSH_AGAIN)
        return data

    def write(self, key: str, data: bytes) -> None:
        """Write the file under a key; a reader sees the old file or the whole new one."""

        def put(path: str) -> None:
            if not self._is_local:
                # One request: the object is there when it ends well, and not at all before.
                self._fs.pipe_file(path, data)
                return
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with staged_file(Path(path), beside=Path(self._root, UPLOADS, "file")) as staged:
                staged.write_bytes(data)

        self._tried(put, f"write '{key}' to", key)

    def names(self, folder: str, kind: str = "file") -> list[str]:
        """Sorted names of the files, or of the entries of another kind, right under a folder."""
        entries = self._tried(partial(self._fs.ls, detail=True), f"list '{folder}' of", folder) or ()
        matching = (str(entry["name"]) for entry in entries if entry["type"] == kind)
        return sorted(name.rstrip("/").rpartition("/")[2] for name in matching)

    def _tried(self, call: Callable[[str], T], doing: str, key: str) -> T | None:
        path, is_write = f"{self._root}/{key}", doing.startswith("write")
        # A listing from before would hide what another process has written since.
        self._fs.invalidate_cache(path)
        try:
            return call(path)
        except LokaError:
            raise
        except Exception as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not is_write:
                return None
            kind: type[LokaError] = BundleError
            remedy = "try again, or mend what the evidence names: a push sends only the rest"
            is_network = isinstance(error, (ConnectionError, TimeoutError))
            is_network |= getattr(error, "errno", None) in _NETWORK
            if is_write and isinstance(error, OSError) and not is_network:
                kind, remedy = OutputError, f"choose a place that may be written and has room, or {remedy}"
            elif isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                kind, remedy = UserError, "log in, or ask for the right to read it"
            # Of a server: no line of it may pass for one of ours.
            evidence = printable(" ".join(f"{type(error).__name__}: {error}".split()))
            what = f"cannot {doing} the registry"
            raise kind(what, where=self.url, evidence=evidence, remedy=remedy) from error
