"""Requests through loaded programs: which program or CUDA graph serves them, buffers, refusals, freeing."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from inductor_programs import (
    DYNAMIC,
    STATIC,
    Recording,
    StandInGpu,
    calls_of,
    expected,
    on_cpu,
    on_gpu,
    request,
    torch,
)

from loka_onnx.engines.inductor.executors import JOINED, GraphExecutor, HostExecutor, Placement, fit_int32
from loka_onnx.engines.inductor.gpu import Captured, Gpu
from loka_onnx.engines.inductor.package import InductorEngine, InputPort, OutputPort, Program
from loka_onnx.engines.inductor.session import InductorSession, placements
from loka_onnx.errors import EngineError
from loka_onnx.sessions.buckets import Piece
from loka_onnx.sessions.cuda import list_cuda_devices
from loka_onnx.sessions.runner import ParallelRunner


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 4), (4, 4), (5, 5), (8, 16), (16, 16), (17, 17)])
def test_a_graph_serves_what_it_holds_unless_most_of_it_would_be_padding(rows: int, size: int) -> None:
    captured = size in DYNAMIC.sizes
    assert placements(DYNAMIC, rows, captures=True) == (Placement("rows", Piece(0, rows, size), captured),)
    assert placements(DYNAMIC, rows, captures=False) == (Placement("rows", Piece(0, rows, rows), False),)


def test_programs_of_fixed_sizes_serve_any_size() -> None:
    assert placements(STATIC, 3, captures=False) == (Placement("rows4", Piece(0, 3, 4), False),)
    found = [(p.program, p.piece.size, p.captured) for p in placements(STATIC, 22, captures=True)]
    assert found == [("rows16", 16, True)] * 2


@pytest.mark.parametrize("rows", [0, 65])
@pytest.mark.parametrize("make", [on_gpu, on_cpu])
def test_a_batch_outside_the_range_is_refused(make: Any, rows: int) -> None:
    session, _ = make()
    with pytest.raises(EngineError, match=rf"{rows} rows; it takes 1 to 64"):
        session.run(request(rows))


@pytest.mark.parametrize("engine", [DYNAMIC, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("make", [on_gpu, on_cpu])
def test_every_batch_size_is_answered_row_by_row(make: Any, engine: InductorEngine) -> None:
    session, _ = make(engine)
    # All are asked first: an answer outlives the next request.
    answers = {rows: session.run(request(rows)) for rows in (1, 2, 3, 4, 7, 16, 17, 33, 64)}
    for rows, answer in answers.items():
        np.testing.assert_array_equal(answer["out"], expected(request(rows)))
        np.testing.assert_array_equal(answer["version"], np.arange(3))


def filled(buffers: Any, values: dict[str, Any]) -> Any:
    """Pinned memory of a session, with values in it."""
    assert buffers is not None
    for name, value in values.items():
        buffers[name][:] = value
    return buffers


@pytest.mark.parametrize("rows", [3, 4, 16])
def test_rows_in_pinned_memory_are_read_where_they_lie(rows: int) -> None:
    session, program = on_gpu()
    first, second = session.buffers(rows), session.buffers(rows)
    for seed, buffers in enumerate((first, second, first)):
        found = session.run(filled(buffers, request(rows, seed)))["out"]
        np.testing.assert_array_equal(found, expected(request(rows, seed)))
    # Another session copies them like any array.
    np.testing.assert_array_equal(on_gpu()[0].run(second)["out"], expected(request(rows, 1)))
    assert len(program.ids) in DYNAMIC.sizes


def mixed(*, fits_int32: bool) -> tuple[InductorSession, StandInGpu, list[Any]]:
    """A session of inputs of several types and shapes, whose outputs are the inputs; and the ids it saw."""
    ids = ("int64", (), fits_int32), ("int64", (3,), fits_int32)
    kinds = {
        "x": ("float32", (2,)),
        "a": ids[0],
        "flag": ("bool", ()),
        "history": ids[1],
        "b": ids[0],
        "time": ("int64", ()),
    }
    ports = tuple(InputPort(name, *kind) for name, kind in kinds.items())
    outputs = tuple(OutputPort(f"{name}_out", True) for name in kinds)
    engine = replace(DYNAMIC, inputs=ports, outputs=outputs, sizes=(5, 16))
    gpu, seen = StandInGpu(), list[Any]()

    def program(inputs: list[Any]) -> Sequence[Any]:
        assert [str(each.dtype) for each in inputs] == [f"torch.{port.dtype}" for port in ports]
        seen.append(inputs[1].tolist())
        return [each.clone() for each in inputs]

    executor = GraphExecutor(torch, engine, {"rows": program}, gpu)  # type: ignore[arg-type]
    return InductorSession(engine, executor), gpu, seen


def mixed_request(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(rows)
    return {
        "x": rng.normal(size=(rows, 2)).astype(np.float32),
        "a": rng.integers(-(2**31), 2**31, rows),
        "flag": rng.random(rows) < 0.5,
        "history": rng.integers(0, 2**31, (rows, 3)),
        "b": rng.integers(-5, 5, rows),
        "time": rng.integers(2**40, 2**41, rows),
    }


def check_mixed(session: InductorSession, inputs: Any) -> None:
    answer = session.run(inputs)
    for name, value in inputs.items():
        np.testing.assert_array_equal(answer[f"{name}_out"], value)
        assert answer[f"{name}_out"].dtype == value.dtype


@pytest.mark.parametrize("fits_int32", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 11, 16, 17, 40])
def test_columns_of_any_type_order_and_layout_arrive(rows: int, fits_int32: bool) -> None:
    session, _, _ = mixed(fits_int32=fits_int32)
    inputs = mixed_request(rows)
    table = np.stack([inputs["a"], inputs["b"]], axis=1)
    strided = {"a": table[:, 0], "b": table[::-1, 1], "history": np.asfortranarray(inputs["history"])}
    for asked in (inputs, inputs | strided, {name: inputs[name] for name in reversed(inputs)}, inputs):
        check_mixed(session, asked)
    if (buffers := session.buffers(rows)) is not None:
        assert {name: each.dtype for name, each in buffers.items()} == {n: v.dtype for n, v in inputs.items()}
        filled(buffers, inputs)
        # It holds any int64.
        buffers["a"][-1] = 2**40 + 3
        check_mixed(session, buffers)
        check_mixed(mixed(fits_int32=fits_int32)[0], buffers)


@pytest.mark.parametrize("fits_int32", [False, True])
def test_a_graph_gets_the_last_row_as_padding(fits_int32: bool) -> None:
    session, _, seen = mixed(fits_int32=fits_int32)
    check_mixed(session, mixed_request(5))
    inputs = mixed_request(3)
    for asked in (inputs, filled(session.buffers(3), inputs)):
        session.run(asked)
        assert seen[-1] == [*inputs["a"], inputs["a"][-1], inputs["a"][-1]]


def test_ids_travel_in_half_of_the_bytes() -> None:
    wide, narrow = (mixed(fits_int32=fits)[1].moved for fits in (False, True))
    # The rows of both sizes and the outputs, which stay as they are.
    ids = 8 * (1 + 1 + 3) * (5 + 16)
    assert wide - narrow == pytest.approx(ids / 2, abs=64)


@pytest.mark.parametrize("bad", [2**31, 2**32 + 5, -(2**31) - 1, 2**62, -(2**63)])
@pytest.mark.parametrize("name", ["a", "b", "history"])
@pytest.mark.parametrize("rows", [3, 5, 40])
def test_an_id_beyond_int32_reaches_the_program_as_it_is(rows: int, name: str, bad: int) -> None:
    session, gpu, seen = mixed(fits_int32=True)
    inputs = mixed_request(rows)
    check_mixed(session, inputs)
    inputs[name][(-1,) * inputs[name].ndim] = bad
    check_mixed(session, inputs)
    session.resident(inputs)()
    assert seen[-1][:rows] == inputs["a"].tolist()
    # The next request is again a launch and a wait.
    gpu.calls.clear()
    check_mixed(session, mixed_request(5))
    assert gpu.calls == ["activate", "replay", "synchronize"]


def test_requests_of_many_sizes_keep_few_views() -> None:
    engine = replace(DYNAMIC, maximum=200, sizes=(200,), programs=(Program("rows", 1, 200),))
    session, _ = on_gpu(engine)
    for rows in (*range(100, 201), 150, 100):
        np.testing.assert_array_equal(session.run(request(rows))["out"], expected(request(rows)))
    executor: Any = session._executor
    assert 0 < executor._served[200].staging.targets.cache_info().currsize <= 64


@pytest.mark.parametrize(("make", "rows"), [(on_gpu, 33), (on_cpu, 4)])
def test_there_is_no_pinned_memory_where_no_graph_reads_it(make: Any, rows: int) -> None:
    assert make()[0].buffers(rows) is None


def test_a_free_session_takes_the_request_and_memory_goes_to_its_own() -> None:
    pairs = [on_gpu(), on_gpu()]
    with ParallelRunner([session for session, _ in pairs]) as runner:
        held = [runner.buffers(4), runner.buffers(4)]
        for buffers, (session, _) in zip(held, pairs, strict=True):
            assert filled(buffers, request(4)).session is session
            np.testing.assert_array_equal(runner.run(buffers)["out"], expected(request(4)))
        for seed in range(3):
            np.testing.assert_array_equal(runner.run(request(4, seed))["out"], expected(request(4, seed)))
        assert all(program.rows.count(4) >= 2 for _, program in pairs)
        assert (runner.served_sizes, runner.device, runner.stream) == ((4, 16), 0, 0)
    for session, _ in pairs:
        with pytest.raises(EngineError, match="the engine is closed"):
            session.run(request(4))


def test_two_graphs_are_captured_for_each_size_that_is_served() -> None:
    program = Recording()
    GraphExecutor(torch, DYNAMIC, calls_of(DYNAMIC, program), StandInGpu())  # type: ignore[arg-type]
    # The kernels alone and a request; the largest first, so that the others find their memory in its pool.
    assert program.rows == [16, 16, 4, 4]


def test_a_request_is_one_graph_and_one_wait() -> None:
    session, _ = on_gpu()
    gpu: Any = session._executor._gpu  # type: ignore[union-attr]
    for asked in (request(4), request(3), filled(session.buffers(4), request(4))):
        gpu.calls.clear()
        session.run(asked)
        assert gpu.calls == ["activate", "replay", "synchronize"]


def test_the_graph_of_a_callers_memory_ends_with_either_of_them() -> None:
    session, _ = on_gpu()
    executor: Any = session._executor
    own = len(executor._stagings)
    kept, dropped = session.buffers(4), session.buffers(16)
    # Two sizes with two graphs each, and the caller's.
    assert executor._gpu.calls.count("capture") == 6
    assert len(executor._stagings) == own + 2
    del dropped
    assert len(executor._stagings) == own + 1
    gpu = executor._gpu
    session.close()
    assert gpu.calls.count("reset") == 5
    with pytest.raises(EngineError, match="the engine is closed"):
        session.run(kept)


def test_a_program_that_cannot_be_captured_is_refused() -> None:
    class Refuses(StandInGpu):
        def capture(self, call: Any, *, warm_ups: int) -> Captured:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(EngineError, match=r"16 rows(?s:.*)evidence: operation not permitted when"):
        GraphExecutor(torch, DYNAMIC, calls_of(DYNAMIC, Recording()), Refuses())  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [on_gpu, on_cpu])
def test_types_are_converted_and_other_shapes_refused(make: Any) -> None:
    session, _ = make()
    inputs = request(4)
    wide = {"x": inputs["x"].astype(np.float64), "ids": inputs["ids"].astype(np.int32)}
    np.testing.assert_array_equal(session.run(wide)["out"], expected(inputs))
    for bad, said in (
        ({**inputs, "x": np.zeros((4, 3))}, r"'x' (?s:.*)\(4, 3\), .* \(rows, 2\)"),
        ({"x": inputs["x"]}, "input 'ids' is missing"),
        ({**inputs, "ids": inputs["ids"][:3]}, "'x' 4, 'ids' 3"),
    ):
        with pytest.raises(EngineError, match=said):
            session.run(bad)


def test_an_input_that_is_handed_through_is_copied() -> None:
    engine = replace(DYNAMIC, inputs=DYNAMIC.inputs[:1], outputs=DYNAMIC.outputs[:1])
    session = InductorSession(engine, HostExecutor(torch, engine, {"rows": lambda inputs: [inputs[0]]}))
    x = request(4)["x"]
    answer = session.run({"x": x})["out"]
    np.testing.assert_array_equal(answer, x)
    answer[:] = 0
    assert x.any()


def test_closing_frees_everything_once() -> None:
    program, gpu = Recording(), StandInGpu()
    calls = calls_of(DYNAMIC, program)
    with InductorSession(DYNAMIC, GraphExecutor(torch, DYNAMIC, calls, gpu)) as session:  # type: ignore[arg-type]
        session.run(request(4))
    assert gpu.calls[-5:] == [*["reset"] * 4, "close"]
    assert calls == {}
    session.close()
    assert gpu.calls.count("close") == 1
    with pytest.raises(EngineError, match="the engine is closed"):
        session.run(request(4))


def test_threads_are_served_one_after_the_other() -> None:
    inside: list[int] = []
    most: list[int] = []

    def slow(inputs: list[Any]) -> Sequence[Any]:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()
        return [inputs[0] * 2 + inputs[1][:, None], torch.arange(3)]

    session = InductorSession(DYNAMIC, HostExecutor(torch, DYNAMIC, {"rows": slow}))
    threads = [threading.Thread(target=session.run, args=(request(4),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_a_resident_batch_is_padded_with_its_last_row_and_launched_without_its_copies() -> None:
    session, program = on_gpu()
    session.run(request(4))
    resident = session.resident(request(3))
    gpu: Any = session._executor._gpu  # type: ignore[union-attr]
    gpu.calls.clear()
    resident.launch()
    resident.launch()
    assert gpu.calls == ["replay", "replay"]
    resident()
    assert gpu.calls == ["replay", "replay", "replay", "synchronize"]
    # Not 4, which the request before left in the buffer.
    assert program.ids == [1, 2, 3, 3]


def test_a_request_in_pieces_is_resident_as_a_whole() -> None:
    session, program = on_cpu(STATIC)
    resident = session.resident(request(22))
    assert program.rows == []
    resident()
    assert program.rows == [16, 16]


@pytest.mark.gpu
def test_cuda_graphs_on_a_gpu() -> None:
    if not list_cuda_devices() or not torch.cuda.is_available():
        pytest.skip("needs a GPU: CUDA graphs are captured and replayed")
    for engine in (DYNAMIC, STATIC):
        program = Recording()

        def eager(inputs: list[Any]) -> Sequence[Any]:
            # No item() of a tensor: that waits for the device, which a capture refuses.
            x, ids = inputs
            return [x * 2 + ids[:, None], torch.arange(3, device=x.device)]

        executor = GraphExecutor(torch, engine, {p.name: eager for p in engine.programs}, Gpu(torch, 0))
        with InductorSession(engine, executor) as session:
            for rows in (1, 3, 4, 16, 33):
                inputs = request(rows)
                np.testing.assert_allclose(session.run(inputs)["out"], expected(inputs), rtol=1e-6)
            session.resident(request(4))()
            for rows in (3, 4, 16):
                held = [session.buffers(rows), session.buffers(rows)]
                for seed, buffers in enumerate((*held, *held)):
                    inputs = request(rows, seed)
                    for asked in (filled(buffers, inputs), inputs):
                        np.testing.assert_allclose(session.run(asked)["out"], expected(inputs), rtol=1e-6)
                # A graph that is freed leaves the others as they are.
                del held[0], buffers
                np.testing.assert_allclose(
                    session.run(request(rows))["out"], expected(request(rows)), rtol=1e-6
                )
        assert program.rows == []


@pytest.mark.parametrize("rows", [8, JOINED + 1])
@pytest.mark.parametrize(
    ("value", "fits"), [(2**31 - 1, True), (-(2**31), True), (2**31, False), (-(2**31) - 1, False)]
)
def test_every_column_is_looked_through_for_ids_that_int32_lacks(rows: int, value: int, fits: bool) -> None:
    columns = [np.zeros(rows, np.int64) for _ in range(3)]
    columns[1][rows - 1] = value
    assert fit_int32(columns) is fits
