"""Opening the three splits that a run file names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loka_onnx.config import RunConfig, SplitBy
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.data import InputBinding, SplitRule, Splits, open_dataset, split_file
from loka_onnx.errors import ConfigError, ModelError

IdBounds = Mapping[str, tuple[range | None, ...]]


def bind_columns(
    columns: Mapping[str, tuple[str, ...]], inputs: Sequence[TensorSpec], bounds: IdBounds | None = None
) -> tuple[InputBinding, ...]:
    """Bind each model input to its columns.

    Args:
        columns: Columns of each input by its name; the column of its own name where it is left out.
        bounds: Ids that lookups take, by input; one range for each of its columns.

    Raises:
        ConfigError: An input is named that the model does not have, or the wrong number of columns.
        ModelError: An input has more than two axes.
    """
    known = [spec.name for spec in inputs]
    for name in columns:
        if name not in known:
            raise ConfigError(
                f"E1526 the model has no input '{name}'",
                where="data.inputs",
                evidence=f"its inputs are {', '.join(known)}",
                remedy="correct the name",
            )
    return tuple(
        _bind(columns.get(spec.name, (spec.name,)), spec, (bounds or {}).get(spec.name)) for spec in inputs
    )


def open_splits(config: RunConfig, bindings: Sequence[InputBinding]) -> Splits:
    """Open calibration, selection and certification, which must be disjoint.

    Raises:
        ConfigError: Two splits share rows.
        DataError: A file or a column is missing or of the wrong type.
    """
    data = config.data
    if data.path is not None and data.split is not None:
        fractions = data.split.fractions
        rule = SplitRule(
            by="hash" if data.split.by is SplitBy.HASH else "fraction",
            calibration=fractions.calibration,
            selection=fractions.selection,
            certification=fractions.certification,
            column=data.split.column,
            seed=data.split.seed,
        )
        return split_file(
            data.path, rule, bindings, config.columns, config.nullable_columns, config.column_keys
        )
    if data.calibration is None or data.selection is None or data.certification is None:
        raise ConfigError("E1527 `data` names no rows", remedy="give three files, or `path` with `split`")
    return Splits(
        *(
            open_dataset(path, bindings, config.columns, None, config.nullable_columns, config.column_keys)
            for path in (data.calibration, data.selection, data.certification)
        )
    )


def split_rule(config: RunConfig) -> str:
    """Describe how the rows are split."""
    split = config.data.split
    if split is None:
        return "a file of its own"
    shares = split.fractions
    how = f"by a hash of '{split.column}'" if split.by is SplitBy.HASH else "in file order"
    return f"{how}: {shares.calibration:g} / {shares.selection:g} / {shares.certification:g}"


def _bind(
    columns: tuple[str, ...], spec: TensorSpec, bounds: tuple[range | None, ...] | None
) -> InputBinding:
    rank = len(spec.shape)
    if rank not in {1, 2}:
        raise ModelError(
            f"E1528 input '{spec.name}' has {rank} axes",
            evidence=f"shape {spec.shape}",
            remedy="a table feeds inputs of shape (batch,) or (batch, columns): reshape inside the model",
        )
    width = spec.shape[1] if rank == 2 else 1
    if width is not None and len(columns) not in {1, width}:
        raise ConfigError(
            f"E1529 input '{spec.name}' takes {width} columns, {len(columns)} are named",
            where=f"data.inputs.{spec.name}",
            evidence=f"its shape is {spec.shape}",
            remedy="name one column for each",
        )
    return InputBinding(spec.name, columns, spec.dtype, rank, bounds)
