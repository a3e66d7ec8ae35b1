"""Bundles that somebody changed, or that hold more than data: each is refused, and nothing of them runs."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import edit, put

from loka_onnx.bundle.format.archive import pack_bundle, verify_path
from loka_onnx.bundle.format.files import read_sample, verify_bundle
from loka_onnx.bundle.inspection import inspect_bundle
from loka_onnx.bundle.registry import push_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.triton import export_triton
from loka_onnx.core.digests import seal
from loka_onnx.core.manifest import MAX_MANIFEST_BYTES, paths_problem
from loka_onnx.engines.triton.models import TritonOptions
from loka_onnx.errors import BundleInvalid
from loka_onnx.operations.compare.bundles import diff_bundles

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
def test_every_file_is_missed(original, tmp_path, change, message):
    """Gone, under another name, or a link to where it is."""
    for number, path in enumerate((*listed(original), "manifest.json")):
        bundle, away = tmp_path / str(number), tmp_path / f"{number}.away"
        shutil.copytree(original, bundle)
        (bundle / path).rename(away)
        change(bundle / path, away)
        refuses(bundle, message)


@pytest.mark.parametrize("name", ["extra.txt", "engines/extra.bin", ".hidden", "a\udce9b", "new\nline"])
def test_an_added_file_is_noticed(bundle, name):
    (bundle / os.fsdecode(os.fsencode(name))).write_bytes(b"x")
    refuses(bundle, r"file '.*' is not listed in the manifest")


IRREGULAR = r"'added' is not a regular file\n  evidence: a"


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (Path.mkdir, "directory 'added' is empty"),
        (lambda added: added.joinpath(*"dddddddd").mkdir(parents=True), "directory 'added/d.*' is too deep"),
        (lambda added: added.symlink_to("engines"), f"{IRREGULAR} symbolic link"),
        (os.mkfifo, f"{IRREGULAR} named pipe"),
    ],
)
def test_added_directories_links_and_pipes_are_noticed(bundle, add, message):
    add(bundle / "added")
    refuses(bundle, message)


def test_single_flipped_bytes_are_noticed(bundle, tmp_path):
    """In random places of the whole bundle, and as many in the documents that no digest lists."""
    sign_bundle(bundle, write_key_pair(tmp_path / "keys").private)
    rng = np.random.default_rng(3)
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    sizes = np.array([path.stat().st_size for path in files])
    anywhere = rng.choice(files, FLIPS, p=sizes / sizes.sum())
    unlisted = [bundle / "manifest.json", bundle / "signature.json"] * (FLIPS // 2)
    for path in (*anywhere, *unlisted):
        kept = path.read_bytes()
        data = bytearray(kept)
        data[int(rng.integers(len(data)))] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        refuses(bundle, r"was altered|the (manifest|signature) (is not|cannot be read as UTF-8)")
        path.write_bytes(kept)
    verify_bundle(bundle)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "the manifest is not valid JSON") for text in (b"{", b"", b"[" * 200_000, b"9" * 5000)),
        (b"\xff\xfe", "cannot be read as UTF-8"),
        (b'{"schema": "schema", "schema": 2}', "key 'schema' stands twice in one object"),
        (b"[]", "unknown schema"),
        (b"null", "unknown schema"),
        (b'{"schema": "loka-onnx/bundle-format/2", "value": {}}', "this version reads 'loka-onnx/bundle-fo"),
        (b'{"schema": "loka-onnx/bundle-format/1", "value": {}}', "not a valid loka-onnx/bundle-format/1"),
        (b'{"schema": "loka-onnx/bundle-format/1", "value": "\\ud800"}', "not a loka-onnx/bundle-format/1"),
        (bytes(MAX_MANIFEST_BYTES + 1), f"is too large\n  evidence: {MAX_MANIFEST_BYTES + 1} bytes"),
    ],
)
def test_manifests_that_are_none(bundle, text, message):
    (bundle / "manifest.json").write_bytes(text)
    refuses(bundle, message)


def test_a_byte_behind_a_file_is_noticed_by_its_size_or_the_seal(bundle):
    for path, message in (
        (listed(bundle)[0], r"has another size\n  evidence: \d+ bytes, the manifest says \d+"),
        ("manifest.json", "the manifest was altered\n  evidence: sha256 .*, the seal says"),
    ):
        with (bundle / path).open("ab") as stream:
            stream.write(b" ")
        refuses(bundle, message)


USES: dict[str, Callable[[Path, Path, Path], object]] = {
    "packed": lambda bundle, out, key: pack_bundle(bundle, out),
    "signed": lambda bundle, out, key: sign_bundle(bundle, key),
    "pushed": lambda bundle, out, key: push_bundle(bundle, f"{out}#prod"),
    "exported": lambda bundle, out, key: export_triton(bundle, out, TritonOptions("ranker")),
    "compared": lambda bundle, out, key: diff_bundles(bundle, bundle),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_does_not_verify_is_used_for_nothing(bundle, tmp_path, use):
    key = write_key_pair(tmp_path / "keys").private
    (bundle / "extra").write_text("x")
    with pytest.raises(BundleInvalid, match="'extra' is not listed"):
        use(bundle, tmp_path / "out", key)
    assert not (tmp_path / "out").exists()
    assert not (bundle / "signature.json").exists()


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
    original = path.read_text()
    places = list(leaves(json.loads(original)["value"]))
    odd = [None, -1, 2**70, 1e308, np.nan, "", "../../x", "/dev/zero", "\0", "\ud800", [], {}, True, [[]]]
    rng, refused = np.random.default_rng(23), 0
    for _ in range(400):
        document = json.loads(original)
        *way, last = places[int(rng.integers(len(places)))]
        holder = document["value"]
        for key in way:
            holder = holder[key]
        holder[last] = odd[int(rng.integers(len(odd)))]
        # Another seal is no document that can be sealed.
        with contextlib.suppress(ValueError):
            path.write_text(seal(json.dumps(document, indent=1)))
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
def attack(bundle: Path, tmp_path: Path) -> Path:
    """A bundle, sealed as its maker could, whose sample is a pickle that creates `tmp_path/executed`."""
    evil = np.array([Evil(tmp_path / "executed")], dtype=object)
    engine = verify_bundle(bundle).engines[0].id
    arrays = {"input/dense": evil, f"expected/{engine}/ctr": evil, "expected/fallback-fp32/ctr": evil}
    np.savez(tmp_path / "evil.npz", allow_pickle=True, **arrays)
    put(bundle, "sample.npz", (tmp_path / "evil.npz").read_bytes())
    return bundle


def test_a_pickled_sample_is_refused_and_not_unpickled(attack, tmp_path):
    manifest = verify_path(attack).manifest
    for entry in manifest.candidates:
        with pytest.raises(BundleInvalid, match=r"'sample\.npz' is not an npz of plain arrays") as caught:
            read_sample(attack, manifest, entry)
        assert "allow_pickle=False" in str(caught.value)
    assert not (tmp_path / "executed").exists()
    # Read the careless way, it runs: otherwise neither this test nor the next one would show anything.
    with np.load(attack / "sample.npz", allow_pickle=True) as arrays:
        arrays["input/dense"]
    assert (tmp_path / "executed").exists()


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
def test_no_audit_event_of_unpickling_or_running_is_raised(original, attack, tmp_path):
    for number, bundle in enumerate((attack, original)):
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
