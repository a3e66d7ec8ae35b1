"""A URL of a registry that holds a secret is refused, and nothing of it is shown."""

import pytest

from loka_onnx.bundle.registry import TransferOptions, list_names, parse_reference, push_bundle, resolve
from loka_onnx.errors import ConfigError

FAST = TransferOptions(threads=4)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAuser:SECRET@bucket/x",
        "s3://AKIAuser:SEC/RET@bucket/x",
        "https://host/x?sig=SECRET&v=1",
        "sftp://me:SECRET@host:22/x#prod",
        "s3://user:SEC#RETPART@bucket/x",
        "s3://user:SEC?RETPART@bucket/x#prod",
        "s3://user:SEC/X#RETPART@bucket",
        "s3://user:SEC#sha256:RETPART@bucket/x",
        "http://me:SEC?RETPART@host::x",
        "http://me:SEC\nRETPART@host",
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_shown(url, tmp_path):
    for call in (lambda: resolve(url, FAST), lambda: push_bundle(tmp_path, url), lambda: list_names(url)):
        with pytest.raises(ConfigError, match="neither a password nor a query") as caught:
            call()
        assert not any(secret in str(caught.value) for secret in ("user", "SEC", "RET", "me:"))


@pytest.mark.parametrize(
    "url", ["file:///data/a@b/x", "/data/a@b/x", "sftp://me@host/x", "sftp://host:22/x", "s3://bucket/x"]
)
def test_users_ports_and_paths_are_no_secrets(url):
    assert parse_reference(f"{url}#prod").shown == f"{url}#prod"
