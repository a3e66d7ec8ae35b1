"""Runs that are killed, interrupted, or kept out by another one."""

import fcntl
import os
import random
import signal
import socket
import time

import pytest
from run_findings import findings, resumed
from synthetic_runs import finish, start, tree

import loka_onnx
from loka_onnx.errors import OutputError
from loka_onnx.pipeline.directory import StageOutcome, locked
from loka_onnx.pipeline.run import RunOptions, Stage, run

pytestmark = pytest.mark.slow


def test_a_run_that_is_killed_resumes_to_the_same_results(place, finished):
    moments = random.Random(0)
    after = []
    for attempt in range(4):
        process = start("run", place.run_file, *(["--resume"] if attempt else []))
        after.append(moments.uniform(0.5, 5))
        time.sleep(after[-1])
        process.kill()
        process.communicate()
    done = finish(start("run", place.run_file, "--resume"))
    assert done.code == 0, (after, done.err)
    assert findings(place.output) == findings(finished.directory), after
    loka_onnx.verify_bundle(place.output / "bundle")
    assert not [path for path in place.output.rglob("*") if "building-" in path.name], after


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_is_cleaned_up(place, number, code):
    # Another test may have built the same engines: an engine from the cache is not interrupted.
    process = start("run", place.run_file, "--set", "build.cache_gb=0")
    deadline = time.monotonic() + 60
    while not list(place.output.glob("engines/.*.building-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    done = finish(process)
    assert done.code == code
    assert done.err.splitlines()[-1] == (
        "interrupted; `run --resume` and every stage verb go on from the last finished stage"
    )
    assert "Traceback" not in done.err
    assert not [path for path in place.output.rglob("*") if "building-" in path.name]
    assert resumed(place, Stage.CALIBRATE)["calibrate"]


def test_a_run_killed_while_it_replaces_another_gives_it_back(copied):
    """SIGKILL between setting the earlier run aside and accepting the new input."""
    place, before = copied, tree(copied.output)
    aside = place.output / ".earlier-run"
    aside.mkdir()
    for name in ("plan.json", "model", "run.json"):
        (place.output / name).rename(aside / name)
    (place.output / "model").mkdir()
    (place.output / "model" / "half.onnx").write_bytes(b"?")
    run(place.run_file, RunOptions(resume=True, until=Stage.EXPORT))
    assert tree(place.output) == before


# Two runs in one directory -------------------------------------------------------------------------


def test_a_second_run_is_kept_out_as_long_as_the_first_lives(place, command):
    first = start("run", place.run_file)
    deadline = time.monotonic() + 60
    while not (place.output / "model" / "exported.json").exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    # It ends what it is writing before it stands still.
    os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
    before = tree(place.output)
    for options in (["run"], ["run", "--resume"], ["run", "--force"], ["plan"]):
        done = command(options[0], place.run_file, "--quiet", *options[1:])
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            f"error: the output directory '{place.output}' is in use by another run\n"
            f"  evidence: process {first.pid} on '{socket.gethostname()}' holds the lock on '.run.lock'\n"
            "  remedy: wait until that run has ended, or choose another directory with --output\n"
            "  code: E1519\n"
        )
    assert tree(place.output) == before
    # SIGKILL: nothing of the first run's own could let go of the lock.
    first.kill()
    first.communicate()
    assert (place.output / ".run.lock").exists()
    assert command("plan", place.run_file, "--quiet").code == 0
    assert not (place.output / ".run.lock").exists()


def test_the_lock_ends_with_the_run_however_it_ends(place):
    def fail(stage: str, outcome: StageOutcome | None) -> None:
        if stage == "calibrate":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(place.run_file, RunOptions(on_stage=fail))
    assert not (place.output / ".run.lock").exists()
    assert run(place.run_file, RunOptions(resume=True, until=Stage.EXPORT)).directory == place.output


def test_a_lock_is_not_taken_on_a_file_that_is_gone(tmp_path, monkeypatch):
    """The last run removes the file between a second one's opening and locking it."""
    flock, taken = fcntl.flock, []

    def remove_first(descriptor: int, operation: int) -> None:
        if not taken:
            (tmp_path / ".run.lock").unlink()
        taken.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with locked(tmp_path):
        assert len(taken) == 2
        with pytest.raises(OutputError, match="is in use by another run"), locked(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
