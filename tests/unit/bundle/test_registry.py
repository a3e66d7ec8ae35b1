import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
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


def test_what_is_pulled_is_what_was_pushed(one, url, tmp_path):
    pushed = push_bundle(one, f"{url}#prod", FAST)
    assert pushed.digest == hashlib.sha256((one / "manifest.json").read_bytes()).hexdigest()
    assert (pushed.sent_parts, pushed.kept_parts) == (parts(one), 0)
    pulled = pull_bundle(f"{url}#prod", tmp_path / "deploy" / "bundle", FAST)
    assert tree(pulled.directory) == tree(one)
    assert (pulled.digest, pulled.is_unchanged, pulled.kept_bytes) == (pushed.digest, False, 0)
    assert pulled.read_bytes == pushed.sent_bytes
    assert [p.name for p in (tmp_path / "deploy").iterdir()] == ["bundle"]
    assert (pulled.directory / "manifest.json").stat().st_mode & 0o777 == 0o644
    by_digest = pull_bundle(f"{url}#sha256:{pushed.digest}", tmp_path / "again", FAST)
    assert tree(by_digest.directory) == tree(one)


def test_the_parts_are_where_the_layout_says(one, tmp_path):
    url = tmp_path / "registry"
    push_bundle(one, f"{url}#prod", FAST)
    large = read(one).file("report/extra-0.bin")
    data = (one / large.path).read_bytes()
    stored = [(url / "blobs" / "sha256" / f"{large.sha256}.{n}").read_bytes() for n in range(10)]
    assert [len(part) for part in stored] == [PART] * 9 + [5000]
    assert b"".join(stored) == data
    digest = hashlib.sha256((one / "manifest.json").read_bytes()).hexdigest()
    assert (url / "bundles" / digest / "manifest.json").read_bytes() == (one / "manifest.json").read_bytes()
    assert digest in (url / "names" / "prod.json").read_text()
    assert list((url / "uploads").iterdir()) == []


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


def test_a_part_of_another_size_is_sent_again(one, tmp_path):
    url = tmp_path / "registry"
    push_bundle(one, str(url), FAST)
    part = sorted((url / "blobs" / "sha256").iterdir())[3]
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    assert push_bundle(one, str(url), FAST).sent_parts == 1
    assert part.read_bytes() == whole


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
        data = bytearray(file.read_bytes())
        data[7] ^= 1
        file.write_bytes(data)
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


def test_signatures_travel_and_are_checked_when_asked_for(one, url, tmp_path):
    pairs = {name: write_key_pair(tmp_path / "keys", name) for name in ("ours", "theirs")}
    keys = {name: pair.public for name, pair in pairs.items()}
    unsigned = push_bundle(one, f"{url}#prod", FAST)
    with pytest.raises(BundleInvalid, match="the bundle is not signed") as caught:
        pull_bundle(f"{url}#prod", tmp_path / "x", FAST, keys=[keys["ours"]])
    assert "prod" in str(caught.value)
    sign_bundle(one, pairs["ours"].private)
    signed = push_bundle(one, f"{url}#prod", FAST)
    assert (signed.digest, signed.sent_parts) == (unsigned.digest, 0)
    with pytest.raises(BundleInvalid, match="signed with another key"):
        pull_bundle(f"{url}#prod", tmp_path / "x", FAST, keys=[keys["theirs"]])
    assert not (tmp_path / "x").exists()
    pulled = pull_bundle(f"{url}#prod", tmp_path / "x", FAST, keys=[keys["theirs"], keys["ours"]])
    assert pulled.is_signed
    assert pulled.key is not None
    assert tree(tmp_path / "x") == tree(one)
    assert pull_bundle(f"{url}#prod", tmp_path / "x", FAST).key is None


def test_a_bundle_in_its_single_file_form_can_be_pushed(one, url, tmp_path):
    write_archive(one, tmp_path / "one.zip")
    assert push_bundle(tmp_path / "one.zip", f"{url}#prod", FAST).sent_parts == parts(one)
    pull_bundle(f"{url}#prod", tmp_path / "x", FAST)
    assert tree(tmp_path / "x") == tree(one)


def test_pushes_at_the_same_time_leave_one_whole_bundle(one, two, url, tmp_path):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda bundle: push_bundle(bundle, f"{url}#prod", FAST), (one, two) * 3))
    pull_bundle(f"{url}#prod", tmp_path / "x", FAST)
    assert tree(tmp_path / "x") in (tree(one), tree(two))


def test_a_bundle_that_does_not_verify_is_not_pushed(one, url):
    with (one / "report/extra-0.bin").open("r+b") as stream:
        stream.write(b"\0\0\0\0")
    with pytest.raises(BundleInvalid, match=r"'report/extra-0\.bin' was altered"):
        push_bundle(one, f"{url}#prod", FAST)
    with pytest.raises(UserError, match="there is no registry here"):
        list_names(url, FAST)
    fs, root = fsspec.core.url_to_fs(url)
    assert not fs.exists(f"{root}/blobs")


def test_a_file_that_changes_during_the_push_is_noticed(one, url, monkeypatch):
    verify = transfer.verify_directory

    def then_change(directory):
        verified = verify(directory)
        with (directory / "report/extra-0.bin").open("r+b") as stream:
            stream.seek(40_000)
            stream.write(b"\0\0\0\0")
        return verified

    monkeypatch.setattr(transfer, "verify_directory", then_change)
    with pytest.raises(BundleInvalid, match=r"'report/extra-0\.bin' was altered while it was pushed"):
        push_bundle(one, f"{url}#prod", FAST)
    fs, root = fsspec.core.url_to_fs(url)
    large = read(one).file("report/extra-0.bin").sha256
    assert not [name for name in fs.find(root) if large in name]


def test_a_place_that_is_no_bundle_is_left_alone(one, url, tmp_path):
    push_bundle(one, f"{url}#prod", FAST)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="it exists and is not a bundle, so it is not replaced"):
        pull_bundle(f"{url}#prod", tmp_path / "home", FAST)
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["thesis.txt"]


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
def test_references_that_mean_no_bundle(place, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        pull_bundle(place, tmp_path / "x", FAST)
    assert list(tmp_path.iterdir()) == []


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


def test_without_fsspec_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingPackage, match=r"pip install 'loka-onnx\[registry\]'"):
        resolve(f"{tmp_path}#prod")


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_the_verbs(one, tmp_path):
    registry, digest = tmp_path / "registry", digest_file(one / "manifest.json")
    out = run("push", one, f"{registry}#prod")
    assert f"pushed to {registry}#prod as sha256:{digest}\nsent " in out
    assert "sent 0 parts, 0 bytes" in run("push", one, f"{registry}#staging")
    assert "0 parts, 0 bytes were there" in run("push", one, f"{registry}#prod", "--again")
    assert run("resolve", f"{registry}#prod") == f"sha256:{digest}\n"
    assert run("list", registry).split() == ["prod", f"sha256:{digest}", "staging", f"sha256:{digest}"]
    assert run("promote", f"{registry}#prod", "canary") == f"canary is now sha256:{digest}\n"
    out = run("pull", f"{registry}#canary", tmp_path / "x")
    assert f"sha256:{digest} pulled and verified; not signed\nread " in out
    assert tree(tmp_path / "x") == tree(one)
    assert "is there already, whole" in run("pull", f"{registry}#canary", tmp_path / "x")
    pair = write_key_pair(tmp_path / "keys")
    with pytest.raises(BundleInvalid, match="the bundle is not signed"):
        run("pull", f"{registry}#prod", tmp_path / "y", "--key", pair.public)
    sign_bundle(one, pair.private)
    run("push", one, f"{registry}#prod")
    out = run("pull", f"{registry}#prod", tmp_path / "y", "--key", pair.public)
    assert f"signed with key {pair.fingerprint}" in out
    assert "by whom was not checked (--key)" in run("pull", f"{registry}#prod", tmp_path / "y")


def test_damaged_names_end_with_3(one, tmp_path):
    registry = tmp_path / "registry"
    run("push", one, f"{registry}#prod")
    (registry / "names" / "prod.json").write_text("{}")
    with pytest.raises(CheckFailed, match="1 of 1 names are damaged"):
        run("list", registry)


def test_names_that_somebody_laid_there_are_quoted(one, tmp_path):
    registry = tmp_path / "registry"
    run("push", one, f"{registry}#prod")
    forged = f"prod  sha256:{'0' * 64} \x1b[2K\x1b]0;owned\x07"
    (registry / "names" / f"{forged}.json").write_text("{}")
    done = CliRunner().invoke(app, ["list", str(registry)])
    assert isinstance(done.exception, CheckFailed)
    assert "\x1b" not in done.stdout + str(done.exception)
    assert f"'prod  sha256:{'0' * 64} \\x1b[2K\\x1b]0;owned\\x07' ✗ the name has" in done.stdout.replace(
        "\n", ""
    )


def test_a_registry_that_is_none_is_not_an_empty_one(one, tmp_path):
    with pytest.raises(UserError, match="there is no registry here"):
        run("list", tmp_path / "mistyped")
    run("push", one, tmp_path / "registry")
    done = CliRunner().invoke(app, ["list", str(tmp_path / "registry")])
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no bundle has a name here\n")
