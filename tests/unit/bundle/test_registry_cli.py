from pathlib import Path

import pytest
import typer
from altered import tree, with_files
from typer.testing import CliRunner

from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.cli.bundle_registry import add_registry_verbs
from loka_onnx.core.digests import digest_file
from loka_onnx.errors import BundleInvalid, CheckFailed, UserError

app = typer.Typer()
add_registry_verbs(app)


@pytest.fixture
def one(original: Path, tmp_path: Path) -> Path:
    return with_files(original, tmp_path / "one", (1000,), seed=1)


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
