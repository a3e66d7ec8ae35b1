"""Who made a bundle: keys, signing, and every way in which a signature does not hold."""

import json
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from loka_onnx.bundle import signing
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


def test_the_signature_is_ed25519_over_the_bytes_of_the_manifest(bundle, pair):
    """Checked with the cryptography package alone, as another implementation would."""
    assert sign_bundle(bundle, pair.private) == pair.fingerprint
    public = serialization.load_pem_public_key(pair.public.read_bytes())
    assert isinstance(public, ed25519.Ed25519PublicKey)
    document = json.loads((bundle / SIGNATURE_NAME).read_text())
    assert document["schema"] == "loka-onnx/bundle-signature/1"
    (entry,) = document["value"]["signatures"]
    public.verify(bytes.fromhex(entry["signature"]), (bundle / "manifest.json").read_bytes())
    assert entry["key"] == digest_bytes(public.public_bytes_raw()) == pair.fingerprint
    verified = verify_path(bundle, [pair.public])
    assert (verified.signer, verified.claimed) == (pair.fingerprint, (pair.fingerprint,))
    assert verified.manifest == verify_bundle(bundle)
    # Without a key nobody is asked; what it claims is said.
    assert (verify_path(bundle).signer, verify_path(bundle).claimed) == (None, (pair.fingerprint,))


def test_unsigned_other_key_and_altered_have_their_own_messages(bundle, pair, tmp_path):
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


def with_entries(bundle: Path, change: Callable[[list[dict[str, str]]], list[dict[str, str]]]) -> None:
    """Other signatures, which anybody could write who may write the bundle."""
    path = bundle / SIGNATURE_NAME
    document = json.loads(path.read_text())
    document["value"]["signatures"] = change(document["value"]["signatures"])
    path.write_text(seal(json.dumps(document, indent=1)))


def test_several_keys_may_sign_and_what_anybody_put_there_counts_for_nothing(bundle, pair, tmp_path, caplog):
    other, third, fourth = (write_key_pair(tmp_path / name) for name in ("other", "third", "fourth"))
    for key in (third, third):
        sign_bundle(bundle, key.private)
    false = {"key": other.fingerprint, "signature": "ab" * 64}
    with_entries(bundle, lambda entries: sorted([*entries, false], key=lambda entry: entry["key"]))
    refused(bundle, other.public, rf"the signature does not verify\n  evidence: key {other.fingerprint}")
    with caplog.at_level(logging.WARNING):
        sign_bundle(bundle, pair.private)
    named = ", ".join(sorted([other.fingerprint, third.fingerprint]))
    assert f"keeps signatures that nothing was checked of: key {named}" in caplog.text
    # A false one of a key that is accepted does not undo a true one of another, in any order.
    for keys in ([pair.public, other.public], [other.public, fourth.public, pair.public]):
        assert verify_signature(bundle, keys) == pair.fingerprint
        assert verify_path(bundle, keys).signer == pair.fingerprint
    refused(bundle, other.public, "the signature does not verify")
    refused(bundle, fourth.public, "signed with another key")
    # Its own key replaces it, and one of several is enough.
    sign_bundle(bundle, other.private)
    for key in (other, pair, third):
        assert verify_signature(bundle, [key.public]) == key.fingerprint
    assert set(verify_path(bundle).claimed) == {each.fingerprint for each in (other, pair, third)}
    # A link is no signature.
    (bundle / SIGNATURE_NAME).rename(tmp_path / "elsewhere")
    (bundle / SIGNATURE_NAME).symlink_to(tmp_path / "elsewhere")
    refused(bundle, pair.public, "'signature.json' is not a regular file\n  evidence: a symbolic link")


@pytest.mark.parametrize(("room", "fits"), [(0, True), (-1, False)])
def test_a_signature_may_be_as_long_as_a_reader_accepts(bundle, pair, monkeypatch, room, fits):
    sign_bundle(bundle, pair.private)
    size = (bundle / SIGNATURE_NAME).stat().st_size
    (bundle / SIGNATURE_NAME).unlink()
    monkeypatch.setattr(signing, "MAX_SIGNATURE_BYTES", size + room)
    with nullcontext() if fits else pytest.raises(BundleError, match="too many signatures"):
        sign_bundle(bundle, pair.private)
    assert (bundle / SIGNATURE_NAME).exists() is fits


NO_KEYS, NO_ENTRY = "names no key, or keys out of order", "holds what is no key or no signature"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "the signature is not valid JSON"),
        ('{"schema": "loka-onnx/bundle-signature/2", "value": {}}', "reads 'loka-onnx/bundle-signature/1'"),
        ("x" * 70_000, "the signature is too large\n  evidence: 70000 bytes"),
        (lambda signatures: [], NO_KEYS),
        (lambda signatures: signatures * 2, NO_KEYS),
        (lambda signatures: [{**signatures[0], "key": "\x1b[2J"}], NO_ENTRY),
        (lambda signatures: [{**signatures[0], "key": "F" * 64}], NO_ENTRY),
        (lambda signatures: [{**signatures[0], "signature": "0" * 126}], NO_ENTRY),
    ],
)
def test_documents_that_are_no_signature(bundle, pair, change, message):
    sign_bundle(bundle, pair.private)
    if isinstance(change, str):
        (bundle / SIGNATURE_NAME).write_text(change)
    else:
        with_entries(bundle, change)
    with pytest.raises(BundleInvalid, match=message):
        verify_bundle(bundle)


def test_a_write_signs_before_the_bundle_takes_its_place(sample, pair, tmp_path):
    with pytest.raises(ConfigError, match=r"key '.*none\.key' cannot be read"):
        write_bundle(sample.contents, tmp_path / "never", key=tmp_path / "none.key")
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    place = write_bundle(sample.contents, tmp_path / "new", key=pair.private)
    assert verify_signature(place, [pair.public]) == pair.fingerprint
    unsigned = write_bundle(sample.contents, tmp_path / "unsigned")
    assert (place / "manifest.json").read_bytes() == (unsigned / "manifest.json").read_bytes()
    # A later write without a key leaves no signature of the bundle before it.
    write_bundle(sample.contents, place)
    assert verify_path(place).claimed == ()


def test_private_keys_are_for_their_owner_and_never_overwritten(pair, bundle, caplog):
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


def test_an_encrypted_key_needs_its_password(bundle, tmp_path, monkeypatch):
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


def test_keys_of_openssl_are_keys(bundle, tmp_path):
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


def test_files_that_are_no_such_key(bundle, pair, tmp_path):
    text, large, rsa_private, rsa_public = (tmp_path / name for name in ("text", "large", "key", "pub"))
    text.write_text("-----BEGIN PUBLIC KEY-----\nnonsense\n-----END PUBLIC KEY-----\n")
    large.write_bytes(b"x" * 70_000)
    key, pem = rsa.generate_private_key(public_exponent=65537, key_size=2048), serialization.Encoding.PEM
    bare, kind = serialization.NoEncryption(), serialization.PublicFormat.SubjectPublicKeyInfo
    rsa_private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, bare))
    rsa_private.chmod(0o600)
    rsa_public.write_bytes(key.public_key().public_bytes(pem, kind))
    for call, path, message in (
        (lambda path: verify_path(bundle, [path]), text, "is not a public key in PEM"),
        (lambda path: verify_path(bundle, [path]), large, "is not a key\n  evidence: it has more than 65536"),
        (lambda path: verify_path(bundle, [path]), pair.private, "is a private key, a public one is needed"),
        (lambda path: verify_path(bundle, [path]), rsa_public, "is not an Ed25519 key\n  evidence: .*RSA"),
        (lambda path: verify_path(bundle, [path]), tmp_path / "none", "cannot be read"),
        (lambda path: sign_bundle(bundle, path), pair.public, "is not a private key in PEM"),
        (lambda path: sign_bundle(bundle, path), rsa_private, "is not an Ed25519 key"),
        (lambda path: verify_signature(bundle, []), text, "no key to verify a signature with"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            call(path)
        assert caught.value.exit_code == 2


def test_without_cryptography_signatures_say_what_to_install(bundle, pair, monkeypatch):
    sign_bundle(bundle, pair.private)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(MissingPackage, match=r"pip install 'loka-onnx\[sign\]'"):
        verify_path(bundle, [pair.public])
    assert verify_path(bundle).claimed == (pair.fingerprint,)


def ended(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def test_the_verbs(bundle, tmp_path, capsys):
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
