"""Every exception that this package raises on purpose.

LokaError
├── UserError            the configuration or an input is wrong; exit code 2
│   ├── ConfigError      a run file, an option or a combination of them
│   ├── DataError        rows, columns, values of a data set
│   ├── ModelError       a model file, module or checkpoint
│   ├── OutputError      a place that cannot be written
│   ├── MissingPackage   an optional package that the request needs
│   └── SeveralErrors    several of these, of one look at the inputs
├── StageError           a stage could not finish; exit code 1
│   ├── ExportError
│   ├── CalibrationError
│   ├── TransformError
│   ├── PlanningError
│   ├── EngineError
│   ├── EvaluationError
│   └── BundleError
├── CheckFailed          the check that was asked for did not hold; exit code 3
│   ├── DriftFound
│   ├── BundleInvalid
│   └── BudgetMissed
└── InternalError        a bug in this package; exit code 1, with a traceback

An error says *what* is wrong, *where*, on which *evidence*, and the *remedy*. A code that stays the same when
the wording changes opens the sentence where it is raised, ``DataError("E0214 column…")``, and is its `code`::

    DataError: column 'age' of 'day-08.parquet' holds NaN.
      evidence: 3 of 60000 rows, the first is row 17
      remedy: drop or fill the rows; a model input must be finite
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import ClassVar

CODE = re.compile(r"E\d{4} ")
"""Two digits for the room (`tests/wording.py`), two that count."""
MOST_CHARACTERS = 1500
"""Length of each part of a message: names and values in it come from files."""


def shortened(text: str) -> str:
    """A text without its middle where it is too long for a message."""
    if len(text) <= MOST_CHARACTERS:
        return text
    head = MOST_CHARACTERS * 2 // 3
    return f"{text[:head]} … {len(text) - MOST_CHARACTERS} characters … {text[head - MOST_CHARACTERS :]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Ask for the known word that ends like a given one or is like it; empty where none is."""
    words = [*known]
    near = [each for each in words if each.endswith(f"-{word}")]
    near = near or difflib.get_close_matches(word, words, n=1)
    return f"did you mean '{near[0]}'?" if near else ""


_SOURCE = re.compile(
    r"/onnxruntime_src/\S+:\d+ (?:[\w:<>~*&, ]*::[\w~]+\([^()]*\)(?: const)? )?(?:\[with [^\]]*\] )?"
)


def said_by(error: BaseException) -> str:
    """Return a library's error without its place in ONNX Runtime's source, which hides shapes at fault."""
    return _SOURCE.sub("", str(error)).strip()[:400]


def line_of(error: BaseException, index: int = 0) -> str:
    """Return a line of a library's error, by default the first, or its class where it says nothing."""
    text = _SOURCE.sub("", str(error)).strip()
    return (text.splitlines() or [type(error).__name__])[index].strip()[:400]


class LokaError(Exception):
    """Base of everything raised on purpose.

    Args:
        what: What is wrong, as a sentence without its final stop; says where as well when that
            reads better in one sentence. A code of `CODE` and a space may open it.
        where: File, line, site, node or key, when `what` does not name it.
        evidence: The values that show it.
        remedy: What the reader can do.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", evidence: str = "", remedy: str = "") -> None:
        opening = CODE.match(what)
        self.code = opening[0].rstrip() if opening else ""
        what = what.removeprefix(opening[0] if opening else "")
        what, where, evidence, remedy = map(shortened, (what, where, evidence, remedy))
        self.what, self.where, self.evidence, self.remedy = what, where, evidence, remedy
        lines = [f"{where}: {what}" if where else what]
        lines += [f"  evidence: {evidence}"] if evidence else []
        lines += [f"  remedy: {remedy}"] if remedy else []
        super().__init__("\n".join(lines))

    @property
    def coded(self) -> str:
        """`what` behind its code: the first argument of an error that says the same and more."""
        return f"{self.code} {self.what}" if self.code else self.what

    @property
    def message(self) -> str:
        """Everything that it says, with its code."""
        return f"{self}\n  code: {self.code}" if self.code else str(self)

    @contextmanager
    def in_place_of(self, *kinds: type[Exception], words: Callable[[Exception], str] = str) -> Iterator[None]:
        """Raise this error in place of a block's errors of some classes, whose words are its evidence."""
        try:
            yield
        except kinds as error:
            self.restate(evidence=words(error))
            raise self from error

    def restate(self, **parts: str) -> None:
        """Change parts of what it says (`what` with its code) before it is raised again."""
        said = {"what": self.coded, "where": self.where, "evidence": self.evidence, "remedy": self.remedy}
        LokaError.__init__(self, **said | parts)


class UserError(LokaError):
    """The configuration or an input is wrong."""

    exit_code = 2

    @property
    def errors(self) -> tuple[UserError, ...]:
        """The errors that it stands for: itself."""
        return (self,)


class ConfigError(UserError):
    """A run file, an option, or a combination of them."""


class DataError(UserError):
    """Rows, columns or values of a data set."""


class ModelError(UserError):
    """A model file, module or checkpoint."""


class OutputError(UserError):
    """A place that cannot be written."""


class MissingPackage(UserError):
    """An optional package that the request needs is not installed."""


class SeveralErrors(ConfigError, DataError, ModelError):
    """Errors of one look at the inputs, in the order of the checks; attributes are those of the first.

    Whoever catches one of its classes catches it too.
    """

    def __init__(self, errors: Sequence[UserError]) -> None:
        first = errors[0]
        super().__init__(first.coded, where=first.where, evidence=first.evidence, remedy=first.remedy)
        self._errors = tuple(errors)

    @property
    def errors(self) -> tuple[UserError, ...]:
        """Each of them."""
        return self._errors

    def __str__(self) -> str:
        return self._joined([str(error) for error in self.errors], "\n")

    @property
    def message(self) -> str:
        """The messages of all, or of the first ones that fit a message."""
        return self._joined([error.message for error in self.errors], "\nerror: ")

    def _joined(self, texts: Sequence[str], separator: str) -> str:
        ends = accumulate(len(text) for text in texts)
        shown = max(1, sum(end <= 3 * MOST_CHARACTERS for end in ends))
        left = len(texts) - shown
        more = f"\n{left} more: mend these first" if left else ""
        return separator.join(texts[:shown]) + more


class Collected:
    """Errors of several checks, raised together; that of a file which is read three times counts once."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    @contextmanager
    def check(self) -> Iterator[None]:
        """Keep the error of a block."""
        try:
            yield
        except UserError as error:
            known = {each.coded for each in self.errors}
            self.errors += [each for each in error.errors if each.coded not in known]

    def raise_any(self) -> None:
        """Raise what was kept: one error as it is, several as `SeveralErrors`."""
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else SeveralErrors(self.errors)


class StageError(LokaError):
    """A stage could not finish."""


class ExportError(StageError):
    """A module could not be exported to ONNX."""


class CalibrationError(StageError):
    """Statistics could not be collected."""


class TransformError(StageError):
    """A rewrite broke its contract."""


class PlanningError(StageError):
    """No plan could be made."""


class EngineError(StageError):
    """An engine could not be built, loaded or run."""


class EvaluationError(StageError):
    """An engine could not be evaluated."""


class BundleError(StageError):
    """A bundle could not be written or read."""


class CheckFailed(LokaError):
    """The check that was asked for did not hold."""

    exit_code = 3


class DriftFound(CheckFailed):
    """Live data has moved away from the profile."""


class BundleInvalid(CheckFailed):
    """A bundle does not verify."""


class BudgetMissed(CheckFailed):
    """No FP8 engine is inside the budget, and one was required."""


class InternalError(LokaError):
    """A bug in this package."""
