import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec
import pytest
from altered import read, tree, with_files
from typer.testing import CliRunner

from loka_onnx.bundle.format.archive import write_archive
from loka_onnx.bundle.registry import (
    TransferOptions,
    list_names,
    promote,
    pull_bundle,
    push_bundle,
    resolve,
    transfer,
)
from loka_onnx.bundle.registry.store import Store
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.cli.bundle import bundle as app
from loka_onnx.core.digests import digest_file
from loka_onnx.errors import (
    BundleError,
    BundleInvalid,
    CheckFailed,
    ConfigError,
    MissingPackage,
    OutputError,
    UserError,
)

FAST = TransferOptions(threads=4)
PART = 10_000
pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture
def one(original: Path, tmp_path: Path) -> Path:
    return with_files(original, tmp_path / "one", (95_000, 10_000, 0), seed=1)


@pytest.fixture
def two(original: Path, tmp_path: Path) -> Path:
    return with_files(original, tmp_path / "two", (95_000, 20_001), seed=2)


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path: Path):
    if request.param == "file":
        yield (tmp_path / "registry").as_uri()
        return
    memory = fsspec.filesystem("memory")
    memory.makedirs("/bundles", exist_ok=True)
    yield "memory://bundles"
    memory.rm("/bundles", recursive=True)


def parts(bundle: Path) -> int:
    sizes = {f.sha256: f.bytes for f in read(bundle).files}
    return sum(-(-size // PART) for size in sizes.values())


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_what_is_pulled_is_what_was_pushed(one, url, tmp_path):
    pushed = push_bundle(one, f"{url}#prod", FAST)
    assert pushed.digest == digest_file(one / "manifest.json")
    assert (pushed.sent_parts, pushed.kept_parts) == (parts(one), 0)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="it exists and is not a bundle, so it is not replaced"):
        pull_bundle(f"{url}#prod", tmp_path / "home", FAST)
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["thesis.txt"]
    pulled = pull_bundle(f"{url}#prod", tmp_path / "deploy" / "bundle", FAST)
    assert tree(pulled.directory) == tree(one)
    assert (pulled.digest, pulled.is_unchanged, pulled.kept_bytes) == (pushed.digest, False, 0)
    assert pulled.read_bytes == pushed.sent_bytes
    assert [p.name for p in (tmp_path / "deploy").iterdir()] == ["bundle"]
    assert (pulled.directory / "manifest.json").stat().st_mode & 0o777 == 0o644
    by_digest = pull_bundle(f"{url}#sha256:{pushed.digest}", tmp_path / "again", FAST)
    assert tree(by_digest.directory) == tree(one)


def test_the_parts_are_where_the_layout_says(one, tmp_path):
    registry = tmp_path / "registry"
    push_bundle(one, f"{registry}#prod", FAST)
    large = read(one).file("report/extra-0.bin")
    parts = [registry / "blobs" / "sha256" / f"{large.sha256}.{n}" for n in range(10)]
    assert [part.stat().st_size for part in parts] == [PART] * 9 + [5000]
    assert b"".join(part.read_bytes() for part in parts) == (one / large.path).read_bytes()
    digest = digest_file(one / "manifest.json")
    manifest = registry / "bundles" / digest / "manifest.json"
    assert manifest.read_bytes() == (one / "manifest.json").read_bytes()
    assert digest in (registry / "names" / "prod.json").read_text()
    assert list((registry / "uploads").iterdir()) == []
    # A part of another size is sent again.
    whole = parts[3].read_bytes()
    parts[3].write_bytes(whole[:-1])
    assert push_bundle(one, str(registry), FAST).sent_parts == 1
    assert parts[3].read_bytes() == whole


def test_a_second_push_sends_only_what_is_new(one, two, url):
    first = push_bundle(one, f"{url}#prod", FAST)
    again = push_bundle(one, f"{url}#prod", FAST)
    assert (again.sent_parts, again.kept_parts, again.kept_bytes) == (0, parts(one), first.sent_bytes)
    other = push_bundle(two, f"{url}#prod", FAST)
    assert (other.sent_parts, other.sent_bytes) == (10 + 3, 95_000 + 20_001)
    assert resolve(f"{url}#prod", FAST) == other.digest
    forced = push_bundle(two, f"{url}#prod", FAST, again=True)
    assert (forced.sent_parts, forced.kept_parts) == (parts(two), 0)


def test_a_push_that_lost_the_line_goes_on(one, url, monkeypatch):
    write, calls = Store.write, []

    def cut(store, key, data):
        calls.append(key)
        if len(calls) > 7:
            raise BundleError("the line is cut")
        write(store, key, data)

    monkeypatch.setattr(Store, "write", cut)
    with pytest.raises(BundleError, match="the line is cut"):
        push_bundle(one, f"{url}#prod", FAST)
    monkeypatch.setattr(Store, "write", write)
    with pytest.raises(UserError, match="the registry has no bundle 'prod'"):
        resolve(f"{url}#prod", FAST)
    done = push_bundle(one, f"{url}#prod", FAST)
    assert (done.kept_parts, done.sent_parts) == (7, parts(one) - 7)


def test_a_pull_reads_only_what_the_old_bundle_lacks(one, two, url, tmp_path):
    push_bundle(one, f"{url}#prod", FAST)
    place = tmp_path / "bundle"
    pull_bundle(f"{url}#prod", place, FAST)
    assert pull_bundle(f"{url}#prod", place, FAST).is_unchanged
    push_bundle(two, f"{url}#prod", FAST)
    pulled = pull_bundle(f"{url}#prod", place, FAST)
    assert (pulled.read_bytes, pulled.is_unchanged) == (95_000 + 20_001, False)
    assert pulled.kept_bytes == sum({f.sha256: f.bytes for f in read(place).files}.values()) - 115_001
    assert tree(place) == tree(two)
    # No file is shared with what was replaced, but files of one content are one file.
    digests = [f.sha256 for f in read(place).files]
    for file in read(place).files:
        assert (place / file.path).stat().st_nlink == digests.count(file.sha256)


@pytest.mark.parametrize("damage", ["a bit", "a link"])
def test_a_damaged_old_bundle_is_mended(one, url, tmp_path, damage):
    push_bundle(one, f"{url}#prod", FAST)
    place, file = tmp_path / "bundle", tmp_path / "bundle/report/extra-1.bin"
    pull_bundle(f"{url}#prod", place, FAST)
    if damage == "a link":
        file.rename(tmp_path / "aside")
        file.symlink_to(tmp_path / "aside")
    else:
        flip(file, 7)
    assert pull_bundle(f"{url}#prod", place, FAST).read_bytes == 10_000
    assert not file.is_symlink() and tree(place) == tree(one)


@pytest.mark.parametrize("has_old", [False, True])
def test_an_interrupted_pull_leaves_what_was_there(one, two, url, tmp_path, has_old):
    place, done = tmp_path / "deploy" / "bundle", []
    if has_old:
        push_bundle(one, f"{url}#prod", FAST)
        pull_bundle(f"{url}#prod", place, FAST)
    push_bundle(two, f"{url}#prod", FAST)

    def stop(task, moved, total):
        done.append(moved)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_bundle(f"{url}#prod", place, TransferOptions(threads=2, progress=stop))
    assert [p.name for p in place.parent.iterdir()] == ["bundle"] * has_old
    if has_old:
        assert tree(place) == tree(one)
    pull_bundle(f"{url}#prod", place, FAST)
    assert tree(place) == tree(two)
    assert [p.name for p in place.parent.iterdir()] == ["bundle"]


def test_names_are_listed_resolved_and_promoted(one, two, url):
    with pytest.raises(UserError, match=r"there is no registry here\n.*neither 'names/' nor 'bundles/'"):
        list_names(url, FAST)
    push_bundle(one, url, FAST)
    assert list_names(url, FAST) == ()
    first = push_bundle(one, f"{url}#staging", FAST).digest
    second = push_bundle(two, url, FAST)
    assert second.name is None
    assert promote(f"{url}#staging", "prod", FAST) == first
    assert promote(f"{url}#sha256:{second.digest}", "staging", FAST) == second.digest
    named = list_names(url, FAST)
    expected = [("prod", first, ""), ("staging", second.digest, "")]
    assert [(n.name, n.digest, n.problem) for n in named] == expected
    with pytest.raises(UserError, match="the registry has no bundle of this digest"):
        promote(f"{url}#sha256:{'0' * 64}", "prod", FAST)
    with pytest.raises(UserError, match="the registry has no bundle 'nobody'\n"):
        promote(f"{url}#nobody", "prod", FAST)
    assert resolve(f"{url}#prod", FAST) == first
    with pytest.raises(ConfigError, match="the names of a whole registry are listed"):
        list_names(f"{url}#prod", FAST)


def test_pushes_at_the_same_time_leave_one_whole_bundle(one, two, url, tmp_path):
    """Of directories, and of one in its single-file form."""
    write_archive(two, tmp_path / "two.loka")
    with ThreadPoolExecutor(6) as pool:
        pushed = (one, tmp_path / "two.loka") * 3
        list(pool.map(lambda bundle: push_bundle(bundle, f"{url}#prod", FAST), pushed))
    pull_bundle(f"{url}#prod", tmp_path / "x", FAST)
    assert tree(tmp_path / "x") in (tree(one), tree(two))
    pull_bundle(f"{url}#sha256:{digest_file(two / 'manifest.json')}", tmp_path / "y", FAST)
    assert tree(tmp_path / "y") == tree(two)


def test_a_file_that_changes_during_the_push_is_noticed(one, url, monkeypatch):
    verify = transfer.verify_directory

    def then_change(directory):
        verified = verify(directory)
        flip(directory / "report/extra-0.bin", 40_000)
        return verified

    monkeypatch.setattr(transfer, "verify_directory", then_change)
    with pytest.raises(BundleInvalid, match=r"'report/extra-0\.bin' was altered while it was pushed"):
        push_bundle(one, f"{url}#prod", FAST)
    fs, root = fsspec.core.url_to_fs(url)
    large = read(one).file("report/extra-0.bin").sha256
    assert not [name for name in fs.find(root) if large in name]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("memory://x#a/b", r"a bundle may not be named 'a/b' in a registry\n  evidence: the name has a '/'"),
        ("x#a@b", r"may not be named 'a@b' in a registry\n  evidence: the name has a '@'"),
        ("memory://x#..", r"may not be named '\.\.'"),
        ("memory://x#", r"may not be named ''"),
        (f"memory://x#{'a' * 101}", "is longer than 100 characters"),
        ("memory://x#sha256:12", "'sha256:12' is not a digest"),
        (f"memory://x#sha256:{'G' * 64}", "is not a digest"),
        ("simplecache::memory://x#a", "chains file systems with '::'"),
        ("#a", "it is empty"),
        ("memory://x", r"'memory://x' does not say which bundle"),
    ],
)
def test_references_that_mean_no_bundle(place, message, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=message):
        pull_bundle(place, tmp_path / "x", FAST)
    assert list(tmp_path.iterdir()) == []
    for module in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage, match=r"pip install 'loka-onnx\[registry\]'"):
        resolve(f"{tmp_path}#prod")


@pytest.mark.parametrize(
    "url",
    [
        *("s3://AKIAuser:SECRET@bucket/x", "s3://AKIAuser:SEC/RET@bucket/x", "https://host/x?sig=SECRET&v=1"),
        *(
            "sftp://me:SECRET@host:22/x#prod",
            "s3://user:SEC#RETPART@bucket/x",
            "s3://user:SEC/X#RETPART@bucket",
        ),
        *("s3://user:SEC?RETPART@bucket/x#prod", "s3://user:SEC#sha256:RETPART@bucket/x"),
        *("http://me:SEC?RETPART@host::x", "http://me:SEC\nRETPART@host"),
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_shown(url, tmp_path):
    for call in (lambda: resolve(url, FAST), lambda: push_bundle(tmp_path, url), lambda: list_names(url)):
        with pytest.raises(ConfigError, match="neither a password nor a query") as caught:
            call()
        assert not any(secret in str(caught.value) for secret in ("user", "SEC", "RET", "me:"))


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_the_verbs(one, tmp_path):
    registry, digest = tmp_path / "registry", digest_file(one / "manifest.json")
    with pytest.raises(UserError, match="there is no registry here"):
        run("list", registry)
    run("push", one, registry)
    done = CliRunner().invoke(app, ["list", str(registry)])
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no bundle has a name here\n")
    out = run("push", one, f"{registry}#prod")
    assert f"pushed to {registry}#prod as sha256:{digest}\nsent 0 parts, 0 bytes" in out
    assert "0 parts, 0 bytes were there" in run("push", one, f"{registry}#staging", "--again")
    assert run("resolve", f"{registry}#prod") == f"sha256:{digest}\n"
    assert run("list", registry).split() == ["prod", f"sha256:{digest}", "staging", f"sha256:{digest}"]
    assert run("promote", f"{registry}#prod", "canary") == f"canary is now sha256:{digest}\n"
    pull = partial(run, "pull", f"{registry}#canary")
    assert f"sha256:{digest} pulled and verified; not signed\nread " in pull(tmp_path / "x")
    assert "is there already, whole" in pull(tmp_path / "x")


def test_signatures_travel_and_are_checked_when_asked_for(one, tmp_path):
    place, registry = tmp_path / "x", f"{tmp_path}/registry#prod"
    ours, theirs = (write_key_pair(tmp_path / "keys", name) for name in ("ours", "theirs"))
    pull = partial(run, "pull", registry, place)
    unsigned = push_bundle(one, registry, FAST)
    with pytest.raises(BundleInvalid, match="the bundle is not signed") as caught:
        pull("--key", ours.public)
    assert "prod" in str(caught.value)
    sign_bundle(one, ours.private)
    signed = push_bundle(one, registry, FAST)
    assert (signed.digest, signed.sent_parts) == (unsigned.digest, 0)
    with pytest.raises(BundleInvalid, match="signed with another key"):
        pull("--key", theirs.public)
    assert not place.exists()
    assert f"signed with key {ours.fingerprint}" in pull("--key", theirs.public, "--key", ours.public)
    assert tree(place) == tree(one)
    assert "by whom was not checked (--key)" in pull()


def test_damaged_names_and_those_that_somebody_laid_there_are_told(one, tmp_path):
    registry = tmp_path / "registry"
    run("push", one, f"{registry}#prod")
    (registry / "names/prod.json").write_text("{}")
    forged = f"prod  sha256:{'0' * 64} \x1b[2K\x1b]0;owned\x07"
    (registry / "names" / f"{forged}.json").write_text("{}")
    done = CliRunner().invoke(app, ["list", str(registry)])
    assert isinstance(done.exception, CheckFailed)
    assert "2 of 2 names are damaged" in str(done.exception)
    assert "\x1b" not in done.stdout + str(done.exception)
    quoted = f"'prod  sha256:{'0' * 64} \\x1b[2K\\x1b]0;owned\\x07' ✗ the name has"
    assert quoted in done.stdout.replace("\n", "")
