"""Who made a bundle: keys, signing, and every way in which a signature does not hold."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from sample_run import SampleRun

from loka_onnx.bundle import signing
from loka_onnx.bundle.format import replace
from loka_onnx.bundle.format.archive import verify_path
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.format.signature import SIGNATURE_NAME, verify_signature
from loka_onnx.bundle.signing import PASSWORD_VARIABLE, KeyPair, sign_bundle, write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.cli.main import main
from loka_onnx.core.digests import digest_bytes, seal
from loka_onnx.errors import BundleError, BundleInvalid, ConfigError, MissingPackage, OutputError


@pytest.fixture
def pair(tmp_path: Path) -> KeyPair:
    return write_key_pair(tmp_path / "keys")


def refused(bundle: Path, key: Path, message: str) -> None:
    with pytest.raises(BundleInvalid, match=message) as caught:
        verify_path(bundle, [key])
    assert str(bundle) in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_signed_bundle_verifies_with_the_public_key(bundle: Path, pair: KeyPair) -> None:
    assert sign_bundle(bundle, pair.private) == pair.fingerprint
    assert verify_signature(bundle, [pair.public]) == pair.fingerprint
    verified = verify_path(bundle, [pair.public])
    assert (verified.signer, verified.claimed) == (pair.fingerprint, (pair.fingerprint,))
    assert verified.manifest == verify_bundle(bundle)
    # Without a key nobody is asked; what it claims is said.
    assert verify_path(bundle).signer is None
    assert verify_path(bundle).claimed == (pair.fingerprint,)


def test_the_signature_is_ed25519_over_the_bytes_of_the_manifest(bundle: Path, pair: KeyPair) -> None:
    """Checked with the cryptography package alone, as another implementation would."""
    sign_bundle(bundle, pair.private)
    public = serialization.load_pem_public_key(pair.public.read_bytes())
    assert isinstance(public, ed25519.Ed25519PublicKey)
    document = json.loads((bundle / SIGNATURE_NAME).read_text())
    assert document["schema"] == "loka-onnx/bundle-signature/1"
    (entry,) = document["value"]["signatures"]
    public.verify(bytes.fromhex(entry["signature"]), (bundle / "manifest.json").read_bytes())
    assert entry["key"] == digest_bytes(public.public_bytes_raw()) == pair.fingerprint


def test_unsigned_other_key_and_altered_have_their_own_messages(
    bundle: Path, pair: KeyPair, tmp_path: Path
) -> None:
    other = write_key_pair(tmp_path / "other")
    refused(bundle, pair.public, r"the bundle is not signed\n  evidence: there is no 'signature.json'")
    sign_bundle(bundle, pair.private)
    refused(bundle, other.public, rf"signed with another key\n  evidence: signed with {pair.fingerprint}")
    manifest = bundle / "manifest.json"
    kept = manifest.read_text()
    manifest.write_text(seal(kept.replace('"created_by": "loka-onnx', '"created_by": "somebody')))
    refused(bundle, pair.public, "the manifest was altered since it was signed")
    # Nor does it help to say which manifest was signed.
    signature = bundle / SIGNATURE_NAME
    signed = signature.read_text()
    forged = signed.replace(digest_bytes(kept.encode()), digest_bytes(manifest.read_bytes()))
    signature.write_text(seal(forged))
    refused(bundle, pair.public, rf"the signature does not verify\n  evidence: key {pair.fingerprint}")
    manifest.write_text(kept)
    signature.write_text(signed)
    verify_path(bundle, [pair.public])


def test_several_keys_may_sign_and_one_is_enough(bundle: Path, pair: KeyPair, tmp_path: Path) -> None:
    other, third = write_key_pair(tmp_path / "other"), write_key_pair(tmp_path / "third")
    for key in (pair, other, pair):
        sign_bundle(bundle, key.private)
    assert set(verify_path(bundle).claimed) == {pair.fingerprint, other.fingerprint}
    for key in (pair, other):
        assert verify_signature(bundle, [third.public, key.public]) == key.fingerprint
    refused(bundle, third.public, "signed with another key")


def with_signatures(bundle: Path, *entries: tuple[str, str]) -> None:
    """Adds entries that anybody could who may write the bundle."""
    path = bundle / SIGNATURE_NAME
    document = json.loads(path.read_text())
    listed = document["value"]["signatures"]
    listed += [{"key": key, "signature": signature} for key, signature in entries]
    listed.sort(key=lambda entry: entry["key"])
    path.write_text(seal(json.dumps(document, indent=1)))


def test_signatures_that_anybody_put_there_stay_and_count_for_nothing(
    bundle: Path, pair: KeyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, third = write_key_pair(tmp_path / "other"), write_key_pair(tmp_path / "third")
    sign_bundle(bundle, third.private)
    with_signatures(bundle, (other.fingerprint, "ab" * 64))
    refused(bundle, other.public, rf"the signature does not verify\n  evidence: key {other.fingerprint}")
    with caplog.at_level(logging.WARNING):
        sign_bundle(bundle, pair.private)
    named = ", ".join(sorted([other.fingerprint, third.fingerprint]))
    assert f"keeps signatures that nothing was checked of: key {named}" in caplog.text
    # A false one of a key that is accepted does not undo a true one of another, in any order.
    for keys in ([pair.public, other.public], [other.public, pair.public]):
        assert verify_signature(bundle, keys) == pair.fingerprint
        assert verify_path(bundle, keys).signer == pair.fingerprint
    refused(bundle, other.public, "the signature does not verify")
    # Its own key replaces it.
    sign_bundle(bundle, other.private)
    assert verify_signature(bundle, [other.public]) == other.fingerprint


@pytest.mark.parametrize(("room", "fits"), [(0, True), (-1, False)])
def test_a_signature_may_be_as_long_as_a_reader_accepts(
    bundle: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch, room: int, fits: bool
) -> None:
    sign_bundle(bundle, pair.private)
    size = (bundle / SIGNATURE_NAME).stat().st_size
    (bundle / SIGNATURE_NAME).unlink()
    monkeypatch.setattr(signing, "MAX_SIGNATURE_BYTES", size + room)
    if fits:
        sign_bundle(bundle, pair.private)
    else:
        with pytest.raises(BundleError, match="too many signatures"):
            sign_bundle(bundle, pair.private)
    assert (bundle / SIGNATURE_NAME).exists() is fits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the signature is not valid JSON"),
        ('{"schema": "loka-onnx/bundle-signature/2", "value": {}}', "reads 'loka-onnx/bundle-signature/1'"),
        ("x" * 70_000, "the signature is too large\n  evidence: 70000 bytes"),
    ],
)
def test_documents_that_are_no_signature(bundle: Path, text: str, message: str) -> None:
    (bundle / SIGNATURE_NAME).write_text(text)
    with pytest.raises(BundleInvalid, match=message):
        verify_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda signatures: [], "names no key, or keys out of order"),
        (lambda signatures: signatures * 2, "names no key, or keys out of order"),
        *(
            (lambda s, n=name, v=value: [{**s[0], n: v}], "holds what is no key or no signature")
            for name, value in (("key", "\x1b[2J"), ("signature", "0" * 126), ("key", "F" * 64))
        ),
    ],
)
def test_entries_that_are_no_signature(bundle: Path, pair: KeyPair, change: Any, message: str) -> None:
    sign_bundle(bundle, pair.private)
    path = bundle / SIGNATURE_NAME
    document = json.loads(path.read_text())
    document["value"]["signatures"] = change(document["value"]["signatures"])
    path.write_text(seal(json.dumps(document, indent=1)))
    with pytest.raises(BundleInvalid, match=message):
        verify_bundle(bundle)


def test_a_signature_that_is_a_link_is_refused(bundle: Path, pair: KeyPair, tmp_path: Path) -> None:
    sign_bundle(bundle, pair.private)
    (bundle / SIGNATURE_NAME).rename(tmp_path / "elsewhere")
    (bundle / SIGNATURE_NAME).symlink_to(tmp_path / "elsewhere")
    refused(bundle, pair.public, "'signature.json' is not a regular file\n  evidence: a symbolic link")


def test_what_does_not_verify_is_not_signed(bundle: Path, pair: KeyPair) -> None:
    (bundle / "extra").write_text("x")
    with pytest.raises(BundleInvalid, match="'extra' is not listed"):
        sign_bundle(bundle, pair.private)
    assert not (bundle / SIGNATURE_NAME).exists()


def test_a_bundle_that_is_replaced_meanwhile_is_not_signed(
    sample: SampleRun, bundle: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = dataclasses.replace(sample.contents, engines=sample.contents.engines[1:2])
    sync = replace._sync

    def replaced(path: Path) -> None:
        monkeypatch.setattr(replace, "_sync", sync)
        sync(path)
        write_bundle(fewer, bundle)

    monkeypatch.setattr(replace, "_sync", replaced)
    with pytest.raises(BundleError, match="was replaced while it was being signed"):
        sign_bundle(bundle, pair.private)
    assert len(verify_bundle(bundle).engines) == 1
    assert not (bundle / SIGNATURE_NAME).exists()
    assert sorted(p.name for p in bundle.parent.iterdir()) == ["bundle", "keys"]


def test_a_write_signs_before_the_bundle_takes_its_place(
    sample: SampleRun, pair: KeyPair, tmp_path: Path
) -> None:
    place = write_bundle(sample.contents, tmp_path / "new", key=pair.private)
    assert verify_signature(place, [pair.public]) == pair.fingerprint
    unsigned = write_bundle(sample.contents, tmp_path / "unsigned")
    assert (place / "manifest.json").read_bytes() == (unsigned / "manifest.json").read_bytes()
    # A later write without a key leaves no signature of the bundle before it.
    write_bundle(sample.contents, place)
    assert verify_path(place).claimed == ()


def test_a_bad_key_fails_before_anything_is_written(sample: SampleRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key '.*none\.key' cannot be read"):
        write_bundle(sample.contents, tmp_path / "new", key=tmp_path / "none.key")
    assert list(tmp_path.iterdir()) == []


def test_private_keys_are_for_their_owner_and_never_overwritten(
    pair: KeyPair, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert pair.private.stat().st_mode & 0o777 == 0o600
    before = pair.private.read_bytes()
    with pytest.raises(OutputError, match="is there already"):
        write_key_pair(pair.private.parent)
    assert pair.private.read_bytes() == before
    with caplog.at_level(logging.WARNING):
        sign_bundle(bundle, pair.private)
        assert not caplog.records
        pair.private.chmod(0o644)
        sign_bundle(bundle, pair.private)
    assert "can be read or written by others (mode 644)" in caplog.text


def test_an_encrypted_key_needs_its_password(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "correct horse")
    pair = write_key_pair(tmp_path / "keys", "release")
    assert pair.private.name == "release.key"
    assert b"ENCRYPTED" in pair.private.read_bytes()
    assert sign_bundle(bundle, pair.private) == pair.fingerprint
    for value in ("wrong", ""):
        monkeypatch.setenv(PASSWORD_VARIABLE, value)
        with pytest.raises(ConfigError, match=rf"cannot be read\n(.*\n)?.*set {PASSWORD_VARIABLE}"):
            sign_bundle(bundle, pair.private)
    # The password in the environment does not keep keys without one from being used.
    monkeypatch.setenv(PASSWORD_VARIABLE, "correct horse")
    monkeypatch.delenv(PASSWORD_VARIABLE)
    plain = write_key_pair(tmp_path / "plain")
    monkeypatch.setenv(PASSWORD_VARIABLE, "correct horse")
    assert sign_bundle(bundle, plain.private) == plain.fingerprint


def test_keys_of_openssl_are_keys(bundle: Path, tmp_path: Path) -> None:
    """What `openssl genpkey -algorithm ed25519` writes, for key 1 of RFC 8032, section 7.1."""
    private, public = tmp_path / "k.pem", tmp_path / "k.pub"
    private.write_text(
        "-----BEGIN PRIVATE KEY-----\n"
        "MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n"
        "-----END PRIVATE KEY-----\n"
    )
    private.chmod(0o600)
    public.write_text(
        "-----BEGIN PUBLIC KEY-----\n"
        "MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n"
        "-----END PUBLIC KEY-----\n"
    )
    raw = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert sign_bundle(bundle, private) == digest_bytes(raw)
    assert verify_signature(bundle, [public]) == digest_bytes(raw)


def test_files_that_are_no_such_key(bundle: Path, pair: KeyPair, tmp_path: Path) -> None:
    text, large = tmp_path / "text", tmp_path / "large"
    text.write_text("-----BEGIN PUBLIC KEY-----\nnonsense\n-----END PUBLIC KEY-----\n")
    large.write_bytes(b"x" * 70_000)
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    rsa_private, rsa_public = tmp_path / "rsa.key", tmp_path / "rsa.pub"
    pem = serialization.Encoding.PEM
    rsa_private.write_bytes(
        rsa_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    rsa_private.chmod(0o600)
    rsa_public.write_bytes(
        rsa_key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for path, message in (
        (text, "is not a public key in PEM"),
        (large, "is not a key\n  evidence: it has more than 65536 bytes"),
        (pair.private, "is a private key, a public one is needed"),
        (rsa_public, "is not an Ed25519 key\n  evidence: .*RSA"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            verify_path(bundle, [path])
        assert caught.value.exit_code == 2
    for path, message in (
        (pair.public, "is not a private key in PEM"),
        (rsa_private, "is not an Ed25519 key"),
    ):
        with pytest.raises(ConfigError, match=message):
            sign_bundle(bundle, path)
    with pytest.raises(ConfigError, match="no key to verify a signature with"):
        verify_signature(bundle, [])


def test_without_cryptography_signatures_say_what_to_install(
    bundle: Path, pair: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_bundle(bundle, pair.private)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(MissingPackage, match=r"pip install 'loka-onnx\[sign\]'"):
        verify_path(bundle, [pair.public])
    assert verify_path(bundle).claimed == (pair.fingerprint,)


def ended(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def test_the_verbs(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = tmp_path / "k/bundle.pub"
    assert ended("bundle", "keygen", tmp_path / "k") == 0
    assert ended("bundle", "verify", bundle, "--key", public) == 3
    assert "the bundle is not signed" in capsys.readouterr().err
    assert ended("bundle", "sign", bundle, "--key", tmp_path / "k/bundle.key") == 0
    capsys.readouterr()
    assert ended("bundle", "verify", bundle, "--key", public) == 0
    assert "signed with key " in capsys.readouterr().out
    assert ended("bundle", "verify", bundle) == 0
    assert "signature not checked: name a public key" in capsys.readouterr().out
    assert ended("bundle", "inspect", bundle) == 0
    assert "signed    claims key " in capsys.readouterr().out
    file = tmp_path / "bundle.loka"
    assert ended("bundle", "pack", bundle, file) == 0
    assert ended("bundle", "verify", file, "--key", public) == 0
    assert ended("bundle", "inspect", file) == 0
    assert ended("bundle", "unpack", file, tmp_path / "back") == 0
    verify_path(tmp_path / "back", [public])
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    assert ended("bundle", "unpack", file, tmp_path / "never") == 3
    assert "the archive is cut short" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
