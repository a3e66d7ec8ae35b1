"""The request form of a run: whether a user's features are computed once for all candidates of a request."""

from __future__ import annotations

import os
from dataclasses import replace

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.rewrite import Declined, SharedUsers
from loka_onnx.evaluation.latency import LatencyOptions, measure_interleaved, prepared
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.context import CHECK_ROWS, Context
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.base import Mod, record
from loka_onnx.transforms.requests.share_users import SHARE_USERS, share_users
from loka_onnx.transforms.sequence import STRICT, change

REQUEST = DocumentStage("request", "model/request.json", SharedUsers)
FILE = "model/request.onnx"


def share_features(context: Context, model: ModelArtifact) -> SharedUsers | None:
    """Bring the modified model into request form → `model/request.json`; None if the run file does not ask.

    It is declined where nothing can be shared, an output moves by more than a mod may move it, or it is no
    faster than the model, in FP32 on the CPU. Each planned model is brought into that form by itself.
    """
    request = context.config.data.request
    if request is None:
        context.directory.forget(REQUEST.name)
        return None

    def make() -> SharedUsers:
        graph = GraphModel.load(model.path)
        try:
            said = share_users(graph, request.inputs)
        except Exception as error:
            # As a mod, it is optional: one that fails costs speed, not the run.
            if os.environ.get(STRICT):
                raise
            said = [Declined("", f"the rewrite failed on this model: {type(error).__name__}: {error}")]
        users = SharedUsers(request.inputs, record(SHARE_USERS, said))
        if not users.is_used:
            return users
        graph.save(context.path(FILE))
        try:
            return _judged(context, model, users)
        finally:
            context.path(FILE).unlink()

    config, data = context.config, context.splits.calibration.digest
    reads = {
        "model": model,
        "request": request,
        "data": data,
        "batch": config.batch,
        "threads": config.threads,
    }
    return context.directory.document(REQUEST, reads, make)


def _judged(context: Context, model: ModelArtifact, users: SharedUsers) -> SharedUsers:
    """Compare the request form with the model, on data and in time; with what decides against it."""
    serve = sorted(context.config.batch.serve)[len(context.config.batch.serve) // 2]
    files = (model.path, context.path(FILE))
    before, after = (OnnxSession(file, SessionOptions(context.threads, optimize=False)) for file in files)
    rows = context.first_rows(CHECK_ROWS)
    answers = [before.run(rows)], [after.run(rows)]
    changes = (change(Mod.tolerance, name, *answers) for name in before.output_names)
    moved, tolerance = max(changes, key=lambda pair: pair[0] / pair[1])
    plain, shared = (OnnxSession(file, SessionOptions(context.threads)) for file in files)
    timed = measure_interleaved(
        {
            "plain": prepared(plain, InputPlace.HOST),
            "shared": prepared(shared, InputPlace.HOST, users.inputs),
        },
        context.requests.generated,
        (serve,),
        LatencyOptions(max_seconds=1.0),
        "cpu",
        counts_for_choice=False,
    ).latencies
    times = tuple(timed[name][0].p50_us for name in ("plain", "shared"))
    made = replace(users.record, max_abs=moved, tolerance=tolerance)
    reasons = [f"an output moves by {moved:.3g}, tolerance {tolerance:.3g}"] if not moved <= tolerance else []
    reasons += [f"it takes {times[1]:.0f} µs, and {times[0]:.0f} otherwise"] if times[1] >= times[0] else []
    if reasons:
        declined = tuple(Declined("", reason) for reason in reasons)
        made = replace(made, applied=(), declined=declined, rolled_back=True)
    return replace(users, record=made, times_us=times)
