"""What is secret in the URL of a registry is in no message."""

import pytest

from loka_onnx.bundle.registry import TransferOptions, list_names, push_bundle, resolve
from loka_onnx.bundle.registry.layout import shown_url, without_secrets
from loka_onnx.errors import ConfigError

FAST = TransferOptions(threads=4, attempts=3, pause_seconds=0.0)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://AKIAKEY:s3cr3t@bucket/x", "s3://***@bucket/x"),
        ("s3://AKIAKEY:s3/cr3t@bucket/x", "s3://***@bucket/x"),
        ("https://host/x?sig=s3cr3t&v=1", "https://host/x?***"),
        ("sftp://me:s3cr3t@host:22/x", "sftp://***@host:22/x"),
        ("http://me:s3c?r3t@host/x", "http://***@host/x"),
        ("file:///data/a@b/x", "file:///data/a@b/x"),
        ("/data/a@b/x", "/data/a@b/x"),
    ],
)
def test_secrets_of_a_url_are_not_shown(url, shown):
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:SEC#RETPART@bucket/x",
        "s3://user:SEC?RETPART@bucket/x#prod",
        "s3://user:SEC/X#RETPART@bucket",
        "s3://user:SEC#sha256:RETPART@bucket/x",
        "http://me:SEC?RETPART@host::x",
    ],
)
def test_a_password_that_hides_the_host_is_refused_and_not_shown(url, tmp_path):
    for call in (lambda: resolve(url, FAST), lambda: push_bundle(tmp_path, url), lambda: list_names(url)):
        with pytest.raises(ConfigError, match=r"percent-encode '#' and '\?' in passwords") as caught:
            call()
        assert not any(secret in str(caught.value) for secret in ("user", "SEC", "RET", "me:"))


def test_every_half_of_a_password_with_a_question_mark_is_hidden():
    assert (
        without_secrets("no host 'SEC?RET'; http://me:SEC?RET@host", "http://me:SEC?RET@host").count("SEC")
        == 0
    )
