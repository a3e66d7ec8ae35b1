"""The command's surface on any host: bare installs, poor hosts, schemas and completion."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from absent import python

import loka_onnx
from loka_onnx.cli import main as cli
from loka_onnx.cli.main import main
from loka_onnx.errors import OutputError
from loka_onnx.graph.storage import replacing

HEAVY = (
    "torch", "triton", "onnxruntime", "tensorrt_rtx", "tensorrt", "recbole", "safetensors", "onnxscript",
    "onnx_ir",
)  # fmt: skip
# The lowering to PyTorch and the kernels: the backend imports them when it builds.
NEED_TORCH = ("loka_onnx.engines.inductor.", "loka_onnx.export.checkpoint")


IMPORT_ALL = """
import importlib, json, pkgutil, loka_onnx
failed = {}
for module in pkgutil.walk_packages(loka_onnx.__path__, "loka_onnx.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed[module.name] = error.name
print(json.dumps(failed))
"""


def bare(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, without optional packages."""
    line = [str(argument) for argument in arguments]
    return python(f"from loka_onnx.cli.main import main\nmain({line!r})", without=HEAVY)


@pytest.mark.slow
def test_every_module_imports():
    done = python(IMPORT_ALL, without=HEAVY)
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout)
    assert set(failed.values()) <= {"torch", "triton"}
    assert all(name.startswith(NEED_TORCH) for name in failed)
    declared = {name for name in failed if name.endswith((".spec", ".backend", ".session"))}
    assert declared == set(), "what is needed without building imports no compiler"


@pytest.mark.slow
def test_doctor_says_what_is_missing():
    done = bare("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines()]
    at = lines.index("✗ onnxruntime          missing      does not build, does not run")
    assert lines[at + 1 : at + 3] == [
        "ONNX Runtime is not installed",
        "→ pip install 'loka-onnx[cpu]' (or [nvidia], [amd]: exactly one of them)",
    ]


@pytest.mark.slow
def test_verbs_that_need_nothing():
    done = bare("doctor", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["machine"]["loka_onnx"] == loka_onnx.__version__
    assert not told["backends"]["onnxruntime"]["can_build"]
    assert {package["name"] for package in told["packages"] if package["version"]} <= {"recbole"}
    assert json.loads(bare("schema").stdout)["title"] == "loka-onnx run file"
    assert bare("--version").stdout == f"loka-onnx {loka_onnx.__version__}\n"
    assert "evaluate" in bare("--help").stdout


@pytest.mark.slow
def test_the_demo_says_what_it_needs(tmp_path):
    done = bare("demo", "--output", tmp_path / "runs" / "demo")
    assert done.returncode == 2
    assert done.stderr.startswith("error: PyTorch is not installed\n")
    assert "  remedy: pip install 'loka-onnx[export]'\n" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_import_is_light():
    done = python(
        "import sys, loka_onnx; dir(loka_onnx); print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    )
    assert done.returncode == 0
    loaded = set(done.stdout.split())
    assert "loka_onnx" in loaded
    assert not loaded & {*HEAVY, "onnx", "numpy", "plotly", "pyarrow", "pydantic", "scipy", "rich", "typer"}


def test_public_names_resolve_and_shadow_no_package():
    for name in loka_onnx.__all__:
        value = getattr(loka_onnx, name)
        assert value.__name__ == name
        assert value.__doc__
    packages = {path.name.removesuffix(".py") for path in Path(loka_onnx.__path__[0]).iterdir()}
    assert not packages & set(loka_onnx.__all__)
    assert set(loka_onnx.__all__) == set(loka_onnx._MODULES)
    assert set(loka_onnx.__all__) <= set(dir(loka_onnx))
    with pytest.raises(AttributeError, match="module 'loka_onnx' has no attribute 'quantise'"):
        _ = loka_onnx.quantise


COMMAND = [sys.executable, "-c", "from loka_onnx.cli import command; command()"]


@pytest.mark.slow
def test_an_output_that_is_full_is_an_error_and_no_traceback():
    for arguments in (["--version"], ["schema", "run"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.05, 0.15, 0.4])
def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(delay, tmp_path):
    started = tmp_path / "started"
    code = f"from loka_onnx.cli import command; open({str(started)!r}, 'w').close(); command()"
    process = subprocess.Popen([sys.executable, "-c", code, "doctor"], stderr=subprocess.PIPE, text=True)
    while not started.exists():
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in {-signal.SIGINT, 130}
    assert "Traceback" not in said


LONG_BATCHES = """
import numpy as np, onnx, sys
from pathlib import Path
from loka_onnx.cli import command, main
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import map_in_order

def run(*line, **named):
    body = "".join(f"h{i} = MatMul(h{i - 1}, h0) " for i in range(1, 9))
    text = f"<ir_version: 10, opset_import: ['' : 21]> g (float[n,n] h0) => (float[n,n] h8) {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text.replace("'", '"')), sys.argv[1])
    session = OnnxSession(Path(sys.argv[1]), SessionOptions(threads=1))
    batch = {"h0": np.zeros((1500, 1500), np.float32)}
    def work(_):
        print("began\\n", end="", flush=True)
        return session.run(batch)

    for _ in map_in_order(work, range(99), 2):
        pass

main.app = run
command()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGINT, 3)])
def test_signals_during_batches_end_in_one_line(number, times, tmp_path):
    """A second signal comes while threads in ONNX Runtime are waited for, who may outlive Python."""
    line = [sys.executable, "-c", LONG_BATCHES, str(tmp_path / "model.onnx")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "began\n"
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.1)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said.startswith("interrupted; ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("12 GB"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    ],
    ids=str,
)
def test_what_the_host_ran_out_of_is_told_as_itself(error, monkeypatch, capsys):
    def failing(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    signal.signal(signal.SIGTERM, handler)
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Traceback" not in said and "please report" not in said and str(error) in said


def test_a_disk_that_is_full_while_a_model_is_written_is_an_error_of_the_place(tmp_path):
    (tmp_path / ".model.onnx.unfinished").symlink_to("/dev/full")
    with pytest.raises(OutputError), replacing(tmp_path / "model.onnx") as stream:
        stream.write(bytes(1 << 20))
    assert list(tmp_path.iterdir()) == []


DOCS = Path(__file__).parents[3] / "docs"


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("document", ["profile", "report", "run-comparison"])
def test_the_published_schema_is_current(document, capsys):
    """Write it anew with `loka-onnx schema profile > docs/profile-schema.json`, and likewise the others."""
    text = printed(["schema", document], capsys)
    assert text == (DOCS / f"{document}-schema.json").read_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    assert printed(["schema"], capsys) == printed(["schema", "run"], capsys)


def offered(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash is offered for the last word of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_LOKA_ONNX_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    # A log in JSON does not reach the shell.
    monkeypatch.setenv("LOKA_ONNX_LOG", "json")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("loka-onnx cali", {"calibrate"}),
        ("loka-onnx bundle pu", {"push", "pull"}),
        ("loka-onnx run --re", {"--resume", "--require-fp8"}),
        ("loka-onnx --lo", {"--log"}),
        ("loka-onnx --log ", {"text", "json"}),
        ("loka-onnx calibrate --executor r", {"ray"}),
        # The shell's own business: files.
        ("loka-onnx run R", set()),
    ],
)
def test_what_is_offered(line, expected, monkeypatch, capsys):
    assert set(offered(line, monkeypatch, capsys)) == expected
