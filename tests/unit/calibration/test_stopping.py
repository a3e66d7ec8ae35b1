"""When verdicts are looked at."""

from __future__ import annotations

from loka_onnx.calibration.effects.sensitivity import StoppingSchedule


def looked_at(limit: int, batch: int, may_stop: bool = True) -> list[int]:
    looks, found, done = StoppingSchedule(limit, may_stop), [], 0
    while done < limit:
        done = min(done + batch, limit)
        if looks.is_due(done):
            looks.take(done)
            found.append(done)
    assert looks.taken == len(found)
    return found


def test_looks_come_at_4096_rows_and_then_at_half_as_many_again():
    assert looked_at(30_000, 512) == [4096, 6144, 9216, 13824, 20992, 30_000]
    # A million rows take fifteen.
    assert len(looked_at(1_000_000, 512)) == 15
    # A batch that is larger than the step between looks takes one for all.
    assert looked_at(100_000, 20_000) == [20_000, 40_000, 60_000, 80_000, 100_000]


def test_there_is_one_look_where_nobody_stops_or_the_data_end_first():
    assert looked_at(30_000, 512, may_stop=False) == [30_000]
    assert looked_at(4096, 512) == looked_at(4096, 4096) == [4096]
    assert looked_at(300, 512) == [300]
    assert not StoppingSchedule(4096, may_stop=True).may_stop_early
    assert not StoppingSchedule(30_000, may_stop=False).may_stop_early
    assert StoppingSchedule(4097, may_stop=True).may_stop_early
