"""The run that documents of the fuzzer are altered of: a little model, its engines built by jobs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from synthetic_runs import Workplace, make_columns, write_ranker, write_rows

from loka_onnx.engines.onnxruntime.backend import OnnxRuntimeBackend
from loka_onnx.errors import EngineError
from loka_onnx.pipeline.job_execution import execute_job
from loka_onnx.pipeline.jobs import find_jobs
from loka_onnx.pipeline.run import RunOptions, run

ROWS = 400


def prepare(place: Path) -> None:
    """Leave the model, its rows, the run file and the run directory."""
    place.mkdir(parents=True)
    write_ranker(place / "ranker.onnx")
    write_rows(place / "rows.parquet", make_columns(ROWS))
    file = Workplace(place).write_run_file(build={"job_data": True})
    # A host that cannot build leaves jobs, which one that can executes.
    here = OnnxRuntimeBackend.build_blocker
    OnnxRuntimeBackend.build_blocker = lambda self, architecture: "the fuzzer wants a job"  # type: ignore[method-assign]
    try:
        run(file)
    except EngineError as error:
        assert "all wait for their build jobs" in error.what
    OnnxRuntimeBackend.build_blocker = here  # type: ignore[method-assign]
    for job in find_jobs(place / "runs" / "RUN" / "jobs"):
        execute_job(job)
    run(file, RunOptions(resume=True))


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
