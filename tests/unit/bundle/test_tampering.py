"""Bundles that somebody changed, or that hold more than data: each is refused, and nothing of them runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import edit, put
from sample_run import SampleRun

from loka_onnx.bundle.format.archive import pack_bundle, verify_path
from loka_onnx.bundle.format.files import read_sample, verify_bundle
from loka_onnx.bundle.inspection import inspect_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.digests import seal
from loka_onnx.core.manifest import MAX_MANIFEST_BYTES, paths_problem
from loka_onnx.errors import BundleInvalid

FLIPS = 200


def listed(bundle: Path) -> list[str]:
    return [f.path for f in verify_bundle(bundle).files]


def route(batch: int, engine: str = "cpu-onnxruntime-cpu-fp32") -> dict[str, Any]:
    return {"batch": batch, "engine": engine, "plan": "fp32"}


def refuses(bundle: Path, message: str) -> None:
    with pytest.raises(BundleInvalid, match=message) as caught:
        verify_bundle(bundle)
    assert str(bundle) in str(caught.value)
    assert "remedy:" in str(caught.value)
    assert (caught.value.exit_code, caught.value.code) == (3, "E1246")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path, away: None, r"is missing|is empty"),
        (lambda path, away: away.rename(f"{path}.old"), r"is not listed|'manifest.json' is missing"),
        (lambda path, away: path.symlink_to(away), r"is not a regular file\n  evidence: a symbolic link"),
    ],
)
def test_every_file_is_missed(bundle, tmp_path, change, message):
    """Gone, under another name, or a link to where it is."""
    for path in [*listed(bundle), "manifest.json"]:
        kept = (bundle / path).read_bytes()
        (bundle / path).rename(tmp_path / "elsewhere")
        change(bundle / path, tmp_path / "elsewhere")
        refuses(bundle, message)
        for left in (bundle / path, bundle / f"{path}.old"):
            left.unlink(missing_ok=True)
        (bundle / path).write_bytes(kept)
    verify_bundle(bundle)


@pytest.mark.parametrize("name", ["extra.txt", "engines/extra.bin", ".hidden", "a\udce9b", "new\nline"])
def test_an_added_file_is_noticed(bundle, name):
    (bundle / os.fsdecode(os.fsencode(name))).write_bytes(b"x")
    refuses(bundle, r"file '.*' is not listed in the manifest")


def test_added_directories_links_and_pipes_are_noticed(bundle):
    (bundle / "empty").mkdir()
    refuses(bundle, "directory 'empty' is empty")
    (bundle / "empty").rmdir()
    (bundle / "there").symlink_to("engines")
    refuses(bundle, r"'there' is not a regular file\n  evidence: a symbolic link")
    (bundle / "there").unlink()
    os.mkfifo(bundle / "pipe")
    refuses(bundle, r"'pipe' is not a regular file\n  evidence: a named pipe")


def test_single_flipped_bytes_are_noticed(bundle, tmp_path):
    """In random places of the whole bundle, and as many in the documents that no digest lists."""
    sign_bundle(bundle, write_key_pair(tmp_path / "keys").private)
    rng = np.random.default_rng(3)
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    ends = np.cumsum(sizes)
    unlisted = [bundle / "manifest.json", bundle / "signature.json"]
    for number in range(2 * FLIPS):
        if number < FLIPS:
            at = int(rng.integers(ends[-1]))
            index = int(np.searchsorted(ends, at, side="right"))
            path, place = files[index], at - int(ends[index]) + sizes[index]
        else:
            path = unlisted[number % 2]
            place = int(rng.integers(path.stat().st_size))
        kept = path.read_bytes()
        data = bytearray(kept)
        data[place] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        refuses(bundle, r"was altered|the (manifest|signature) (is not|cannot be read as UTF-8)")
        path.write_bytes(kept)
    verify_bundle(bundle)


def test_another_size_is_noticed_before_the_content_is_read(bundle):
    path = bundle / listed(bundle)[0]
    path.write_bytes(path.read_bytes() + b"\0")
    refuses(bundle, r"has another size\n  evidence: \d+ bytes, the manifest says \d+")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((path, "leaves or repeats a directory") for path in ("../../etc/passwd", "engines/../../x", "./x")),
        *((path, "is absolute") for path in ("/etc/passwd", "C:/x")),
        ("engines\\\\x", "has a backslash"),
        *(
            (path, "has characters other than")
            for path in ("engines//x", "", ".hidden", "a b", "a\n", "a\0", "größe", "x.")
        ),
        *((path, "is a reserved device name") for path in ("NUL", "a/com1.txt")),
        ("a" * 401, "is longer than 400 characters"),
        ("a/" * 8 + "a", "deeper than 8 directories"),
    ],
)
def test_paths_that_leave_the_bundle_or_mean_two_things(bundle, path, message):
    edit(bundle, lambda value: value["files"].append({"path": path, "bytes": 0, "sha256": "0" * 64}))
    refuses(bundle, f"the manifest lists a forbidden path: .*{message}")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a/b", "a/c", "b", "engines/cpu-onnxruntime-fp8/model_1.onnx"], "None"),
        (["a/b", "A/c"], "differ only in case"),
        (["Model.onnx", "model.onnx"], "differ only in case"),
        (["a", "a"], "is listed twice"),
        (["a/b", "a"], "listed as a file and used as a directory"),
    ],
)
def test_paths_are_judged_together(paths, message):
    assert message in str(paths_problem(paths))


def test_a_manifest_without_its_seal(bundle):
    path = bundle / "manifest.json"
    path.write_text(path.read_text() + " ")
    refuses(bundle, "the manifest was altered\n  evidence: sha256 .*, the seal says")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "the manifest is not valid JSON") for text in (b"{", b"", b"[" * 200_000, b"9" * 5000)),
        (b"\xff\xfe", "cannot be read as UTF-8"),
        (b'{"schema": 1, "schema": 2}', "key 'schema' stands twice in one object"),
        (b"[]", "unknown schema"),
        (b"null", "unknown schema"),
        (b'{"schema": "loka-onnx/bundle-format/2", "value": {}}', "this version reads 'loka-onnx/bundle-fo"),
        (b'{"schema": "loka-onnx/bundle-format/1", "value": {}}', "not a valid loka-onnx/bundle-format/1"),
        (b'{"schema": "loka-onnx/bundle-format/1", "value": "\\ud800"}', "not a loka-onnx/bundle-format/1"),
    ],
)
def test_manifests_that_are_none(bundle, text, message):
    (bundle / "manifest.json").write_bytes(text)
    refuses(bundle, message)


def test_a_huge_manifest_is_not_read(bundle):
    with (bundle / "manifest.json").open("r+b") as stream:
        stream.truncate(MAX_MANIFEST_BYTES + 1)
    refuses(bundle, f"the manifest is too large\n  evidence: {MAX_MANIFEST_BYTES + 1} bytes")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(sample="other.npz"), "names sample 'other.npz' but does not list it"),
        (lambda v: v.update(plans="../plans.json"), r"names plans '\.\./plans.json' but does not list it"),
        (lambda v: v.update(report=["x.html"]), "names report 'x.html' but does not list it"),
        (lambda v: v["fallback"].update(path="/bin/sh"), "'/bin/sh' but does not list it"),
        (lambda v: v["fallback"].update(digest="0" * 64), "and the list of files disagree"),
        (lambda v: v["fallback"].update(id=v["engines"][0]["id"]), "two engines of the manifest have one id"),
        (lambda v: v["fallback"].update(batch={"min": 5, "max": 4}), "has an empty batch range"),
        (lambda v: v["fallback"].update(tolerance={"ctr": float("inf")}), "needs one finite tolerance"),
        (lambda v: v["fallback"].update(tolerance={}), "needs one finite tolerance"),
        (lambda v: v.update(lineage_digest="0" * 64), "lineage of the manifest is not that of its digest"),
        (lambda v: v["lineage"][0].update(key="b" * 64), "lineage of the manifest is not that of its digest"),
        (lambda v: v["files"].append({**v["files"][0], "path": "z", "bytes": 1}), "one digest and two sizes"),
        (lambda v: v["inputs"][0].update(dtype="nonsense"), "'dense' has type 'nonsense', which is none"),
        (lambda v: v["outputs"][0].update(dtype="object"), "'ctr' has type 'object', which is none"),
        (lambda v: v["inputs"].append(v["inputs"][0]), "two inputs of the manifest have one name"),
        (lambda v: v["outputs"].append(v["outputs"][0]), "two outputs of the manifest have one name"),
        *(
            (lambda v, r=routes: v["choice"]["targets"][0].update(routes=r), message)
            for routes, message in (
                ([route(4, "gone")], "requests are routed to engine 'gone', which is not"),
                ([route(64), route(64)], r"out of order\n  evidence: .*\[64, 64\]"),
                ([route(0), route(64)], r"out of order\n  evidence: .*\[0, 64\]"),
            )
        ),
        (lambda v: v["files"].append(v["files"][0]), "is listed twice"),
        *(
            (lambda v, n=name: v["files"].append({"path": n, "bytes": 0, "sha256": ""}), "is listed twice")
            for name in ("manifest.json", "signature.json")
        ),
        *(
            (lambda v, n=size: v["files"][0].update(bytes=n), "with a size or digest that no file has")
            for size in (-1, 2**70)
        ),
        *(
            (lambda v, d=digest: v["files"][0].update(sha256=d), "with a size or digest that no file has")
            for digest in ("../../../names/prod", "0" * 63, "G" * 64, "")
        ),
        (lambda v: v.update(run_this="rm -rf"), "at run_this: "),
        (lambda v: v["engines"][0].update(run_this="rm -rf"), "run_this: "),
    ],
)
def test_a_manifest_that_contradicts_itself(bundle, change, message):
    edit(bundle, change)
    refuses(bundle, message)


def test_no_bundle_at_all(tmp_path):
    refuses(tmp_path / "nowhere", "there is no bundle here")
    (tmp_path / "file").write_text("x")
    refuses(tmp_path / "file", "there is no bundle here")


def leaves(value, path=()):
    """Places of all values of a document, inner ones too."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from leaves(inner, (*path, key))


def test_no_value_of_a_manifest_does_more_than_be_refused(bundle, tmp_path):
    """Values that no writer writes, in random places, sealed as somebody could: refused, or of no matter."""
    path = bundle / "manifest.json"
    original = json.loads(path.read_text())
    places = list(leaves(original["value"]))
    odd = [None, -1, 2**70, 1e308, np.nan, "", "../../x", "/dev/zero", "\0", "\ud800", [], {}, True, [[]]]
    rng = np.random.default_rng(23)
    refused = 0
    for _ in range(400):
        document = json.loads(json.dumps(original))
        *way, last = places[int(rng.integers(len(places)))]
        holder = document["value"]
        for key in way:
            holder = holder[key]
        holder[last] = odd[int(rng.integers(len(odd)))]
        try:
            path.write_text(seal(json.dumps(document, indent=1)))
        except ValueError:
            continue
        try:
            verify_path(bundle)
        except BundleInvalid:
            refused += 1
    assert refused > 200
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_manifest_cannot_write_to_a_terminal(bundle):
    """Neither a description nor a message carries escape codes, line breaks or marks that turn text."""
    hidden = "\x1b[2Jx\nsigned    with the right key\u202e"

    def change(value):
        value["created_by"] = hidden
        value["engines"][0]["id"] = hidden
        value["choice"]["targets"][0]["reason"] = hidden

    edit(bundle, change)
    text = inspect_bundle(bundle)
    assert not {"\x1b", "\u202e"} & set(text)
    assert "\nsigned    with" not in text
    assert "\\x1b[2Jx\\nsigned    with the right key\\u202e" in text
    edit(bundle, lambda value: value["engines"][0].update(tolerance={}))
    with pytest.raises(BundleInvalid, match=r"engine '\\x1b\[2Jx\\nsigned"):
        verify_bundle(bundle)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture
def attack(sample: SampleRun, tmp_path: Path) -> Path:
    """A bundle, sealed as its maker could, whose sample is a pickle that creates `tmp_path/executed`."""
    place = write_bundle(sample.contents, tmp_path / "bundle")
    evil = np.array([Evil(tmp_path / "executed")], dtype=object)
    (engine, *_) = (e.artifact.id for e in sample.contents.engines)
    arrays = {"input/dense": evil, f"expected/{engine}/ctr": evil, "expected/fallback-fp32/ctr": evil}
    np.savez(tmp_path / "evil.npz", allow_pickle=True, **arrays)
    put(place, "sample.npz", (tmp_path / "evil.npz").read_bytes())
    return place


def test_the_attack_is_one(attack, tmp_path):
    """Read the careless way, it runs: otherwise the tests below would show nothing."""
    with np.load(attack / "sample.npz", allow_pickle=True) as arrays:
        arrays["input/dense"]
    assert (tmp_path / "executed").exists()


def test_a_pickled_sample_is_refused_and_not_unpickled(attack, tmp_path):
    manifest = verify_path(attack).manifest
    for entry in manifest.candidates:
        with pytest.raises(BundleInvalid, match=r"'sample\.npz' is not an npz of plain arrays") as caught:
            read_sample(attack, manifest, entry)
        assert "allow_pickle=False" in str(caught.value)
    assert not (tmp_path / "executed").exists()


READER = """
import sys
import tempfile
from pathlib import Path

bundle, archive, out = map(Path, sys.argv[1:])
from loka_onnx.bundle.inspection import inspect_bundle
from loka_onnx.bundle.format.archive import as_directory, unpack, verify_path
from loka_onnx.bundle.format.files import read_sample
from loka_onnx.errors import LokaError
from loka_onnx import runtime
from loka_onnx.runtime import load
import numpy, onnx, onnxruntime

# Raised by the interpreter itself, whichever module unpickles or runs a program.
FORBIDDEN = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec")
seen = []

def inside(path):
    return isinstance(path, str) and Path(path).resolve().is_relative_to(bundle.parent)

def hook(event, arguments):
    if event in FORBIDDEN:
        seen.append((event, str(arguments)[:300]))
    if event == "exec" and inside(arguments[0].co_filename):
        seen.append((event, arguments[0].co_filename))
    if event == "ctypes.dlopen" and inside(arguments[0]):
        seen.append((event, arguments[0]))
    if event == "open" and isinstance(arguments[0], str) and set(arguments[1] or "") & set("wax+"):
        if not Path(arguments[0]).resolve().is_relative_to(out.parent):
            seen.append((event, str(arguments)))

import pickle
pickle.loads = pickle.load = None
sys.addaudithook(hook)
manifest = verify_path(bundle).manifest
verify_path(archive)
inspect_bundle(bundle)
unpack(archive, out)
tempfile.tempdir = str(out.parent)
with as_directory(archive) as directory:
    verify_path(directory)
for entry in manifest.candidates:
    try:
        read_sample(bundle, manifest, entry)
    except LokaError as error:
        print("refused", type(error).__name__)
try:
    load(bundle)
except LokaError as error:
    print("refused", type(error).__name__)
assert not seen, seen
print("nothing ran")
"""


@pytest.mark.slow
def test_no_audit_event_of_unpickling_or_running_is_raised(sample, attack, tmp_path):
    good = write_bundle(sample.contents, tmp_path / "good")
    for number, bundle in enumerate((attack, good)):
        around = tmp_path / f"around-{number}"
        around.mkdir()
        archive = pack_bundle(bundle, tmp_path / f"{number}.loka")
        done = subprocess.run(
            [sys.executable, "-c", READER, str(bundle), str(archive), str(around / "out")],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "nothing ran"
        assert ("refused" in done.stdout) == (bundle == attack)
        assert [p.name for p in around.iterdir()] == ["out"]
    assert not (tmp_path / "executed").exists()
