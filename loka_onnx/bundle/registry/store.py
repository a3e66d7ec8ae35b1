"""The place that a registry lies in: bytes under keys, through fsspec.

Every call is tried again after a failure that may pass by itself, with growing random pauses. What fails for
good becomes one of our errors, which show the URL without what is secret in it.
"""

from __future__ import annotations

import errno
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from loka_onnx.bundle.registry import local
from loka_onnx.bundle.registry.layout import has_secrets, shown_url, without_secrets
from loka_onnx.core.progress import Progress, silent
from loka_onnx.errors import BundleError, LokaError, MissingPackage, OutputError, UserError
from loka_onnx.sessions.bundle_documents import printable

T = TypeVar("T")

LONGEST_PAUSE_SECONDS = 10.0

_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,  # what s3fs makes of "503 Slow Down"
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ESTALE,
        errno.ETIMEDOUT,
        getattr(errno, "EREMOTEIO", errno.EIO),  # what s3fs makes of "500 Internal Error"
    }
)
# Errors of aiohttp, botocore and gcsfs are no OSErrors, and the packages may be absent.
_PASSING_NAMES = ("Timeout", "Connection", "Disconnected", "Payload", "IncompleteRead", "ResponseStreaming")
_PASSING_PACKAGES = frozenset({"aiobotocore", "aiohttp", "botocore", "gcsfs", "requests", "urllib3", "http"})


@dataclass(frozen=True)
class TransferOptions:
    """Options of moving bundles.

    Attributes:
        threads: Parts that are under way at once; each takes `layout.PART_BYTES` of memory.
        attempts: How often a call is tried before its failure counts.
        pause_seconds: Longest pause after the first failure; it doubles with each, to
            `LONGEST_PAUSE_SECONDS`.
        storage: Arguments of the file system (fsspec's `storage_options`), as its documentation names them.
        progress: Called with bytes done and to do.
    """

    threads: int = 8
    attempts: int = 6
    pause_seconds: float = 0.5
    storage: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = silent

    def __post_init__(self) -> None:
        if self.threads < 1 or self.attempts < 1 or self.pause_seconds < 0:
            raise UserError(
                "a transfer needs at least one thread and one attempt, and no negative pause",
                evidence=f"threads {self.threads}, attempts {self.attempts}, pause {self.pause_seconds} s",
            )


class Store:
    """A place for the files of a registry; may be used from several threads.

    Args:
        url: Any URL that fsspec opens, or a local directory.
        options: How often to try, and with which storage options.

    Raises:
        MissingPackage: fsspec, or the package for this kind of URL, is not installed.
        UserError: No such kind of URL.
    """

    def __init__(self, url: str, options: TransferOptions) -> None:
        self.shown = shown_url(url)
        self._url = url
        self._options = options
        fsspec = _fsspec()
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options.storage)
        except ImportError as error:
            raise MissingPackage(
                f"'{self.shown}' needs a package that is not installed",
                evidence=without_secrets(str(error), url),
                remedy="pip install s3fs for s3://, gcsfs for gs://, adlfs for az://",
            ) from self._cause(error)
        except (ValueError, TypeError, OSError) as error:
            raise UserError(
                f"'{self.shown}' cannot be opened",
                evidence=without_secrets(str(error), url),
                remedy="give a URL that fsspec knows, like s3://, gs://, az:// or file://",
            ) from self._cause(error)
        self._root = str(root).rstrip("/")
        on_disk = fsspec.implementations.local.LocalFileSystem
        self._directory = Path(root) if isinstance(self._fs, on_disk) else None

    def size(self, key: str) -> int | None:
        """Size in bytes of what lies under a key; None where nothing does.

        Raises:
            BundleError: The registry cannot be reached.
        """

        def ask() -> int | None:
            path = self._path(key)
            # A listing from before would hide what another process has written since.
            self._fs.invalidate_cache(path)
            try:
                found = self._fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return found["size"] if found["type"] == "file" else None

        return self._tried(ask, f"look up '{key}' in")

    def read(self, key: str, limit: int, *, start: int = 0) -> bytes | None:
        """At most `limit` bytes of what lies under a key; None where nothing does.

        Args:
            key: Where it lies.
            limit: What is not needed is not asked for.
            start: First byte.

        Raises:
            BundleError: The registry cannot be reached.
        """

        def ask() -> bytes | None:
            path = self._path(key)
            self._fs.invalidate_cache(path)
            try:
                if self._directory is not None:
                    return local.read_file(self._directory, key, start, limit)
                with self._fs.open(path, "rb", cache_type="none") as stream:
                    if start:
                        stream.seek(start)
                    return bytes(_read_up_to(stream, limit))
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self._tried(ask, f"read '{key}' from")

    def write(self, key: str, data: bytes) -> None:
        """Puts bytes under a key; a reader sees what was there before or all of them.

        Raises:
            OutputError: It may not be written, or there is no room.
            BundleError: The registry cannot be reached.
        """

        def put() -> None:
            if self._directory is not None:
                local.write_file(self._directory, key, data)
            else:
                # One request: the object is there when it ends well, and not at all before.
                self._fs.pipe_file(self._path(key), data)

        self._tried(put, f"write '{key}' to")

    def names(self, folder: str) -> tuple[str, ...]:
        """Last components of the keys right under a folder, sorted; none where it is absent.

        Raises:
            BundleError: The registry cannot be reached.
        """

        def ask() -> tuple[str, ...]:
            path = self._path(folder)
            self._fs.invalidate_cache(path)
            try:
                found = self._fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return ()
            files = [str(entry["name"]) for entry in found if entry["type"] == "file"]
            return tuple(sorted(name.rpartition("/")[2] for name in files))

        return self._tried(ask, f"list '{folder}' of")

    def holds(self, folder: str) -> bool:
        """Whether there is anything under a folder.

        Raises:
            BundleError: The registry cannot be reached.
        """

        def ask() -> bool:
            path = self._path(folder)
            self._fs.invalidate_cache(path)
            try:
                return bool(self._fs.ls(path, detail=False))
            except (FileNotFoundError, NotADirectoryError):
                return False

        return self._tried(ask, f"list '{folder}' of")

    def remove_leftovers(self) -> None:
        """Removes what killed writers left behind; object stores show nothing of an unfinished write.

        Raises:
            OutputError: It may not be written.
        """
        directory = self._directory
        if directory is not None:
            self._tried(lambda: local.remove_leftovers(directory), "tidy")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _tried(self, call: Callable[[], T], doing: str) -> T:
        for attempt in range(1, self._options.attempts + 1):
            try:
                return call()
            except LokaError:
                raise
            except Exception as error:
                if attempt == self._options.attempts or not may_pass(error):
                    self._fail(error, doing, attempt)
            pause = min(LONGEST_PAUSE_SECONDS, self._options.pause_seconds * 2 ** (attempt - 1))
            # Random: clients that failed together do not come back together.
            time.sleep(pause * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _fail(self, error: Exception, doing: str, attempts: int) -> NoReturn:
        what = f"cannot {doing} the registry"
        # Of a server: no line of it may pass for one of ours.
        text = printable(" ".join(without_secrets(f"{type(error).__name__}: {error}", self._url).split()))
        tried = f" (tried {attempts} times)" if attempts > 1 else ""
        if doing.startswith(("write", "tidy")) and isinstance(error, OSError) and not may_pass(error):
            failure: LokaError = OutputError(
                what,
                where=self.shown,
                evidence=text,
                remedy="choose a place that exists, that may be written and has room; what was sent is kept",
            )
        elif isinstance(error, PermissionError) or _is_of_kind(error, "Credential"):
            failure = UserError(
                what, where=self.shown, evidence=text, remedy="log in, or ask for the right to read it"
            )
        elif _is_of_kind(error, "ParamValidation"):
            remedy = "check the URL: the service has other rules for names of buckets and keys"
            failure = UserError(what, where=self.shown, evidence=text, remedy=remedy)
        else:
            remedy = "try again" if may_pass(error) else "mend what the evidence names, then try again"
            failure = BundleError(
                what,
                where=self.shown,
                evidence=text + tried,
                remedy=f"{remedy}: what was moved is kept, and only the rest will be",
            )
        raise failure from self._cause(error)

    def _cause(self, error: Exception) -> Exception | None:
        """What --debug shows as the cause: nothing, where it may hold a secret of the URL."""
        return None if has_secrets(self._url) else error


def may_pass(error: BaseException) -> bool:
    """Whether a failure may pass by itself: of the network, or of a server that is busy."""
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return False
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in _PASSING_PACKAGES]
    if any(name in kind.__name__ for kind in kinds for name in _PASSING_NAMES):
        return True
    status = getattr(error, "status", None) or getattr(error, "code", None)
    return bool(kinds) and isinstance(status, int) and (status >= 500 or status in {408, 429})


def _is_of_kind(error: BaseException | None, kind: str) -> bool:
    """Whether an error, or what it was made of, is one of a library's with this in the name of its class."""
    while error is not None:
        if kind in type(error).__name__:
            return True
        error = error.__cause__
    return False


def in_order(calls: Iterable[Callable[[], T]], threads: int) -> Generator[T, None, None]:
    """Results of calls in their order, while the next ones run in threads.

    At most `threads` calls have been taken from `calls` whose results were not given back, so that what they
    hold fits in memory. The first failure ends it: what has not begun does not, and what runs is waited for.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="registry")
    pending: deque[Future[T]] = deque()
    try:
        for call in calls:
            pending.append(pool.submit(call))
            if len(pending) == threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read_up_to(stream: Any, limit: int) -> bytearray:
    data = bytearray()
    while len(data) < limit:
        chunk = stream.read(limit - len(data))
        if not chunk:
            break
        data += chunk
        if len(data) > limit:
            # A file system that gives more than was asked for; the caller asks for one byte too many.
            del data[limit:]
    return data


def _fsspec() -> Any:
    try:
        import fsspec.core
        import fsspec.implementations.local
    except ImportError as error:
        raise MissingPackage(
            "fsspec is not installed",
            evidence=str(error),
            remedy="pip install 'loka-onnx[registry]', and s3fs for s3://, gcsfs for gs://",
        ) from error
    return fsspec
