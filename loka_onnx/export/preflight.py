"""Preflight: does a model take every batch size, with independent rows?

Later stages need both: errors are sums over rows, splits are disjoint rows, engines get any batch. A few
batches in ONNX Runtime show it in a second:

- the smallest batch, 2 rows, a middle size and the largest run, and each output has one entry for each row,
  which is finite;
- the same batch twice gives the same bits (else the model is random);
- a row gives the same output among other rows, in another order, and in a batch of another size (else rows
  read one another: BatchNormalization in training mode, a norm or a Softmax over axis 0).

The faulty operator is the first, in topological order, whose rows differ: every tensor is made an output.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.errors import EngineError, LokaError, ModelError
from loka_onnx.graph.model import GraphModel, Node, producer
from loka_onnx.graph.storage import all_attributes, all_initializers
from loka_onnx.sessions.model_files import read_model
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

KEY = "model.require_independent_rows"
"""Key of the run file that admits a model with dependent rows."""
_ROWS = 61
"""Rows of compared batches. A prime: an axis of that length, or of a multiple, holds rows."""
_SAME_SHAPE = 1e-5
"""Largest accepted change of a row's output, relative to the largest output, among other rows of a batch of
the same size: a kernel does the same operations, but for products whose number of rows depends on the data.
"""
_OTHER_SHAPE = 1e-3
"""The same at another position or in another batch size, where other kernels may sum in another order. The
zoo's models and 17 public rankers move by 1.5e-7 at most from 1 row to 4,096 (ONNX Runtime 1.31, x86-64, one
thread and two); a statistic over the batch moves outputs by per cent.
"""
_CONVERTED = 1e-4
"""Largest accepted change of an output by the conversion of a file: operator sets, functions, FP64."""
_CONVERTED_HALF = 2e-2
"""The same for a file that computes in FP16, whose roundings (2⁻¹¹ each) the conversion omits."""
_FAILED_NODE = re.compile(r"while running (\S+) node\. Name:'([^']*)'")


class Fault(StrEnum):
    """Faults of a model."""

    FAILS = "fails"
    SHAPE = "shape"
    NOT_FINITE = "not finite"
    RANDOM = "random"
    COUPLED = "coupled"
    CONVERTED = "converted"


_WHAT = {
    Fault.FAILS: "fails at a batch size that it is to serve",
    Fault.SHAPE: "does not give one entry for each row",
    Fault.NOT_FINITE: "gives outputs that are no finite numbers",
    Fault.RANDOM: "is random: the same rows give other outputs each time",
    Fault.COUPLED: "couples the rows of a batch: what a row gives depends on the others",
    Fault.CONVERTED: "does not keep its outputs when it is brought into canonical form",
}
_EXPORTED_AGAIN = f"export it in inference mode (`model.eval()`), or go on with `{KEY}: false`"
_REMEDY = {
    Fault.FAILS: "correct the operator for that size and export again, or change `batch.min` and `batch.max`",
    Fault.SHAPE: "export the model again; a Squeeze needs its axes named to leave a batch of one row alone",
    Fault.NOT_FINITE: "check the weights and what the operator is given: a logarithm, a root or a quotient "
    "may need a bound in the model, or the data other rows; torch.onnx.export(dynamo=True) drops guards below"
    " 1e-8, as of x / (n + 1e-9), unless optimize=False",
    Fault.RANDOM: _EXPORTED_AGAIN,
    Fault.COUPLED: "correct the operator: (batch, n) beside (batch, 1, n) is broadcast to (batch, batch, n); "
    f"or {_EXPORTED_AGAIN}",
    Fault.CONVERTED: "export it in FP32, with opset_version=21 or later and without functions",
}


@dataclass(frozen=True)
class Finding:
    """A fault, the node that makes it with its operator, and the values that show it."""

    fault: Fault
    operator: str
    evidence: str

    @property
    def is_about_rows(self) -> bool:
        """True if a run may go on by its key: batches run, but rows are not independent."""
        return self.fault in {Fault.RANDOM, Fault.COUPLED}

    @property
    def what(self) -> str:
        """The fault, as the end of a sentence that starts with the model."""
        return _WHAT[self.fault]

    def error(self, model: Path) -> ModelError:
        """The exception that refuses the model."""
        return ModelError(
            f"E0409 '{model}' {self.what}",
            where=self.operator,
            evidence=self.evidence,
            remedy=_REMEDY[self.fault],
        )


@dataclass(frozen=True)
class Batches:
    """Batch sizes that a model must take, and rows to run, repeated if needed; 0 threads for all cores.

    Rows that were generated are no evidence that a model gives NaN.
    """

    rows: Arrays
    smallest: int = 1
    largest: int = 256
    threads: int = 0
    are_generated: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The smallest, 2, the geometric middle and the largest, ascending."""
        middle = isqrt(self.smallest * self.largest)
        second = min(max(2, self.smallest), self.largest)
        return tuple(sorted({self.smallest, second, middle, self.largest}))

    @property
    def compared(self) -> int:
        """Rows of compared batches."""
        return min(max(_ROWS, self.smallest), self.largest)

    def first(self, size: int) -> dict[str, Array]:
        """Return the first rows, repeated if there are fewer."""
        return self._taken(np.arange(size))

    def apart(self, count: int, offset: int) -> dict[str, Array]:
        """Return evenly spread rows: adjacent ones may be of one user."""
        available = max(map(len, self.rows.values()))
        step = max(available // (2 * count), 1)
        return self._taken((np.arange(count) * 2 + offset) * step)

    def _taken(self, places: npt.NDArray[np.intp]) -> dict[str, Array]:
        return {name: values[places % len(values)] for name, values in self.rows.items()}


@dataclass(frozen=True)
class _Pair:
    """Two batches with rows in common, at `places` in each; `how` tells the second from the first.

    `tolerance` is the largest accepted difference of their outputs, 0 for equal bits.
    """

    batches: tuple[Arrays, Arrays]
    places: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
    tolerance: float
    fault: Fault
    how: str

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of each batch."""
        one, other = (len(next(iter(batch.values()))) for batch in self.batches)
        return one, other


def preflight(model: GraphModel, batches: Batches, outputs: Sequence[str]) -> tuple[Finding, ...]:
    """Run a canonical model on a few batches; return the first fault of each kind, none for a sound model."""
    return _Preflight(model, batches, tuple(outputs)).findings()


def check_conversion(source: Path, model: GraphModel, batches: Batches, outputs: Sequence[str]) -> None:
    """Compare a canonical model with its source, if ONNX Runtime runs that; ModelError if an output moved."""
    rows, written = batches.apart(batches.compared, 0), read_model(source)
    kinds = {info.name: info.type.tensor_type.elem_type for info in written.graph.input}
    try:
        with OnnxSession(source, SessionOptions(threads=1, as_written=True)) as session:
            taken = {
                name: values.astype(onnx.helper.tensor_dtype_to_np_dtype(kinds[name]))
                for name, values in rows.items()
            }
            before = session.run(taken, outputs)
    except (ModelError, EngineError):
        return
    with _opened(model, 1, as_written=True) as session:
        after = session.run(rows, outputs)
    types = {*kinds.values(), *(tensor.data_type for tensor in all_initializers(written.graph))}
    types |= {each.i for each in all_attributes(written.graph) if each.name == "to"}
    tolerance = _CONVERTED_HALF if onnx.TensorProto.FLOAT16 in types else _CONVERTED
    for name, old in before.items():
        wide = old.astype(after[name].dtype)
        if not _agree(wide, after[name], tolerance):
            evidence = f"output '{name}'{_moved(wide, after[name])} in {batches.compared} rows"
            raise Finding(Fault.CONVERTED, _maker(model, name), evidence).error(source)


@dataclass
class _Preflight:
    model: GraphModel
    batches: Batches
    outputs: tuple[str, ...]
    _instrumented: OnnxSession | None = field(default=None, init=False)

    def findings(self) -> tuple[Finding, ...]:
        """The first fault of each kind."""
        by_size: dict[int, dict[str, Array]] = {}
        with _opened(self.model, self.batches.threads) as session:
            for size in self.batches.sizes:
                try:
                    by_size[size] = session.run(self.batches.first(size), self.outputs)
                except EngineError as error:
                    return (self._failure(size, error),)
        for size, of_size in by_size.items():
            for name, values in of_size.items():
                if values.shape[:1] != (size,):
                    return (self._shape(name, values, size),)
                if (
                    not self.batches.are_generated
                    and values.dtype.kind == "f"
                    and not np.isfinite(values).all()
                ):
                    return (self._not_finite(name, values, size),)
        finding = self._coupling() or self._by_size(by_size)
        return () if finding is None else (finding,)

    def _coupling(self) -> Finding | None:
        """Return the finding of comparisons in one thread and one batch size."""
        count = self.batches.compared
        batch, others = self.batches.apart(count, 0), self.batches.apart(count, 1)
        every, kept = np.arange(count), np.arange(0, count, 2)
        mixed = {name: values.copy() for name, values in batch.items()}
        for name, values in mixed.items():
            values[1::2] = others[name][1::2]
        turned = {name: values[::-1] for name, values in batch.items()}
        pairs = (
            _Pair((batch, batch), (every, every), 0.0, Fault.RANDOM, "once more"),
            _Pair((batch, mixed), (kept, kept), _SAME_SHAPE, Fault.COUPLED, "among other rows"),
            _Pair((batch, turned), (every, every[::-1]), _OTHER_SHAPE, Fault.COUPLED, "in another order"),
        )
        with _opened(self.model, 1, as_written=True) as session:
            for pair in pairs:
                one, other = (session.run(rows, self.outputs) for rows in pair.batches)
                # A kernel's state (running mean of a BatchNormalization in training mode) shows only where
                # nothing else reads it: then in its reader's rows.
                finding = self._compared([pair, pairs[1]], one, other)
                if finding is not None:
                    return finding
        return None

    def _by_size(self, outputs: Mapping[int, Arrays]) -> Finding | None:
        """Return the finding of batches of several sizes, which begin with the same rows."""
        largest = max(outputs)
        for size in sorted(outputs)[:-1]:
            rows = np.arange(size)
            batches = (self.batches.first(largest), self.batches.first(size))
            how = f"in a batch of {size} and not of {largest}"
            pair = _Pair(batches, (rows, rows), _OTHER_SHAPE, Fault.COUPLED, how)
            finding = self._compared([pair], outputs[largest], outputs[size])
            if finding is not None:
                return finding
        return None

    def _compared(self, pairs: Sequence[_Pair], one: Arrays, other: Arrays) -> Finding | None:
        """Return the finding for the first differing pair; any may name the operator."""
        pair = pairs[0]
        for name in self.outputs:
            left, right = one[name][pair.places[0]], other[name][pair.places[1]]
            if _agree(left, right, pair.tolerance):
                continue
            evidence = f"output '{name}' of the same rows{_moved(left, right)} {pair.how}"
            operators = (self._first_apart(tried) for tried in pairs)
            return Finding(pair.fault, next(filter(None, operators), _maker(self.model, name)), evidence)
        return None

    # Naming the operator ---------------------------------------------------------------------------

    def _failure(self, size: int, error: EngineError) -> Finding:
        """Return the failing operator: ONNX Runtime names it unless it is fused."""
        evidence = error.evidence
        try:
            self._every_tensor().run(self.batches.first(size))
        except LokaError as again:
            evidence = again.evidence if _FAILED_NODE.search(again.evidence) else evidence
        named = _FAILED_NODE.findall(evidence)
        operator = " in ".join(f"node '{name}' ({op})" for op, name in reversed(named))
        reason = evidence.rpartition("Status Message: ")[2].strip()
        return Finding(Fault.FAILS, operator or "the model", f"a batch of {size} rows: {reason or evidence}")

    def _shape(self, name: str, values: Array, size: int) -> Finding:
        """Return the operator that loses the batch: the first whose rank depends on the number of rows."""
        evidence = f"output '{name}' has the shape {list(values.shape)} for a batch of {size} rows"
        other = self.batches.sizes[-1]
        if other != size:
            one = self._every_tensor().run(self.batches.first(size))
            two = self._every_tensor().run(self.batches.first(other))
            for node, tensor in self._tensors():
                if tensor in one and np.ndim(one[tensor]) != np.ndim(two[tensor]):
                    return Finding(Fault.SHAPE, _named(node), evidence)
        return Finding(Fault.SHAPE, _maker(self.model, name), evidence)

    def _not_finite(self, name: str, values: Array, size: int) -> Finding:
        """Return the first operator that makes NaN, or else infinity, which may be a mask's."""
        bad = int(np.count_nonzero(~np.isfinite(values).reshape(size, -1).all(axis=1)))
        evidence = f"output '{name}' of {bad} of {size} rows"
        computed = self._every_tensor().run(self.batches.first(size))
        for is_bad in (np.isnan, np.isinf):
            for node, tensor in self._tensors():
                made = computed.get(tensor)
                if made is not None and made.dtype.kind == "f" and is_bad(made).any():
                    return Finding(Fault.NOT_FINITE, _named(node), evidence)
        return Finding(Fault.NOT_FINITE, _maker(self.model, name), evidence)

    def _first_apart(self, pair: _Pair) -> str:
        """Return the first node in topological order whose output differs for the common rows; "" for none.

        Numbers count before integers and flags, whose shapes and values may follow the batch.
        """
        try:
            session = self._every_tensor()
            one, other = (session.run(rows) for rows in pair.batches)
        except (ModelError, EngineError):
            return ""
        # A random integer is a fault too.
        for kinds in ("fiub",) if pair.fault is Fault.RANDOM else ("f", "iub"):
            for node, name in self._tensors():
                if (
                    name in one
                    and one[name].dtype.kind in kinds
                    and _rows_apart(pair, one[name], other[name])
                ):
                    return _named(node)
        return ""

    def _every_tensor(self) -> OnnxSession:
        """Return a session with every tensor of the main graph as output, where its type is known."""
        if self._instrumented is None:
            graph = self.model.copy()
            for _, name in self._tensors():
                tensor = graph.tensors()[name]
                if tensor.dtype is not None and not graph.is_output(tensor):
                    graph.add_output(tensor, tensor.dtype, None)
            self._instrumented = _opened(graph, 1, as_written=True)
        return self._instrumented

    def _tensors(self) -> Iterator[tuple[Node, str]]:
        """Yield every tensor that a node computes, in topological order."""
        for node in self.model.sorted_nodes():
            for tensor in node.outputs:
                if tensor.name:
                    yield node, tensor.name


def _maker(model: GraphModel, output: str) -> str:
    maker = next(producer(tensor) for tensor in model.outputs if tensor.name == output)
    return f"output '{output}'" if maker is None else _named(maker)


def _opened(model: GraphModel, threads: int, *, as_written: bool = False) -> OnnxSession:
    exported = model.export()
    options = SessionOptions(threads=threads, optimize=False, as_written=as_written)
    held = exported.in_memory()
    if held is not None:
        return OnnxSession.in_memory(held.proto, held.weights, Path("model.onnx"), options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        exported.write(path)
        return OnnxSession(path, options)


def _named(node: Node) -> str:
    return f"node '{node.name}' ({node.op})"


def _agree(one: Array, other: Array, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f" or tolerance == 0.0:
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return np.allclose(other, one, rtol=0.0, atol=tolerance * _largest(one), equal_nan=True)


def _largest(values: Array) -> float:
    finite = np.abs(values[np.isfinite(values)].astype(np.float64))
    return float(finite.max(initial=0.0))


def _moved(one: Array, other: Array) -> str:
    if one.shape != other.shape or one.dtype.kind != "f":
        return " differs"
    moved = _largest(other.astype(np.float64) - one.astype(np.float64))
    return f" moves by {moved:.3g}, its largest magnitude is {_largest(one):.3g},"


def _rows_apart(pair: _Pair, one: Array, other: Array) -> bool:
    """Return whether a tensor differs for the rows that two batches have in common.

    The row axis, known by its length, is a multiple of the rows, its outer or inner part; a tensor without
    one must be the same as a whole.
    """
    if one.ndim != other.ndim:
        return True
    layouts = list(_layouts(pair, one, other))
    if not layouts:
        return one.shape == other.shape and not _agree(one, other, pair.tolerance)
    return not any(_agree(left, right, pair.tolerance) for left, right in layouts)


def _layouts(pair: _Pair, one: Array, other: Array) -> Iterator[tuple[Array, Array]]:
    """Yield the common rows of a tensor in both batches, in every layout that its shape allows."""
    sizes = pair.sizes
    for axis, lengths in enumerate(zip(one.shape, other.shape, strict=True)):
        parts = [length // size for length, size in zip(lengths, sizes, strict=True)]
        whole = all(part * size == length for part, size, length in zip(parts, sizes, lengths, strict=True))
        if not whole or parts[0] != parts[1] or not parts[0]:
            continue
        if any(a != b for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if i != axis):
            continue
        for inner in (False, True):
            taken = []
            for values, size, places in zip((one, other), sizes, pair.places, strict=True):
                split = (parts[0], size) if inner else (size, parts[0])
                shaped = values.reshape(*values.shape[:axis], *split, *values.shape[axis + 1 :])
                taken.append(np.take(shaped, places, axis=axis + inner))
            yield taken[0], taken[1]
