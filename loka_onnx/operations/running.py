"""A run from Python or without a run file: on a model and rows, with the file that `init` would write."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loka_onnx.config import RunConfig, build_run_config
from loka_onnx.data.parquet import write_table
from loka_onnx.errors import ConfigError
from loka_onnx.operations.proposal import propose, run_name
from loka_onnx.pipeline.run import RunOptions, RunResult
from loka_onnx.pipeline.run import run as run_pipeline

_log = logging.getLogger(__name__)


def run(
    source: RunConfig | str | Path,
    data: object = None,
    options: RunOptions | None = None,
    *,
    outputs: Sequence[Mapping[str, Any]] = (),
    overrides: Mapping[str, object] | None = None,
) -> RunResult:
    """Turn a trained model into the fastest engine that is still accurate.

    Args:
        source: A run file or its configuration; or an .onnx file, followed by `data`.
        data: Rows of an .onnx file: a .parquet or .npz file, a dict of arrays, or a table of pandas, polars
            or pyarrow, which is written to ``runs/<name>.parquet``. With a run file, it may be the options.
        options: Options of the run.
        outputs: Outputs of an .onnx file as in a run file; guessed from its graph, and said, where left out.
        overrides: Values by key of the run file, such as ``{"batch.max": 512}``.

    Raises:
        UserError: The configuration or an input is wrong, or another run is at work in the directory.
        StageError: A stage could not finish.
    """
    if data is None or isinstance(data, RunOptions):
        return run_pipeline(source, data if isinstance(data, RunOptions) else options)
    model = Path(str(source))
    if not isinstance(data, str | Path):
        data = write_table(data, Path.cwd() / "runs" / f"{run_name(model)}.parquet")
    labels = [str(output["label"]) for output in outputs if output.get("label")]
    values = {**(overrides or {}), **({"outputs": list(map(dict, outputs))} if outputs else {})}
    config, guesses = proposed_config(model, Path(data), values, labels)
    for line in guesses:
        _log.warning("guessed, as no run file was given: %s", line)
    return run_pipeline(config, options)


def proposed_config(
    model: Path, data: Path, overrides: Mapping[str, object], labels: Sequence[str] = ()
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration that `init` would write, and its guesses.

    Raises as `propose`; a ConfigError also if an input has no column or a value is wrong.
    """
    proposal, source = propose(model, data, home=Path.cwd(), labels=labels), f"{model} {data}"
    if proposal.unmatched:
        raise ConfigError(
            f"E1642 {len(proposal.unmatched)} inputs of the model have no column",
            where=source,
            evidence=", ".join(match.input for match in proposal.unmatched[:8]),
            remedy=f"loka-onnx init {source}, and name their columns in the file that it writes",
        )
    config = build_run_config(proposal.document, Path.cwd(), source=source, overrides=overrides)
    return config, proposal.guesses
