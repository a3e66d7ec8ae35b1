"""A registry in S3: s3fs and its real HTTP client against moto's S3."""

from pathlib import Path

import pytest
from altered import read, tree, with_files
from s3_server import s3_server

from loka_onnx.bundle.registry import TransferOptions, list_names, pull_bundle, push_bundle
from loka_onnx.errors import BundleInvalid


@pytest.fixture
def s3(monkeypatch, small_parts):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # Nothing of the machine's own account is looked for.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with s3_server() as (address, handler):
        storage = {
            "key": "AKIATEST",
            "secret": "s3cr3t",
            "client_kwargs": {"endpoint_url": address},
            "skip_instance_cache": True,
        }
        import s3fs

        s3fs.S3FileSystem(**storage).mkdir("models")
        yield TransferOptions(threads=4, storage=storage), handler
        import moto.backends

        moto.backends.get_backend("s3").reset()


@pytest.fixture
def one(original: Path, tmp_path: Path) -> Path:
    return with_files(original, tmp_path / "one", (35_000, 100, 0), seed=1)


def test_push_pull_and_retry(one, s3, tmp_path):
    options, handler = s3
    url = "s3://models/ranker"
    pushed = push_bundle(one, f"{url}#prod", options)
    puts = [path for verb, path in handler.requests if verb == "PUT" and "blobs" in path]
    assert len(set(puts)) == len(puts) == pushed.sent_parts
    handler.requests.clear()
    assert push_bundle(one, f"{url}#prod", options).sent_parts == 0
    assert not [path for verb, path in handler.requests if verb == "PUT" and "blobs" in path]
    assert [(n.name, n.digest) for n in list_names(url, options)] == [("prod", pushed.digest)]
    handler.broken += [503, 500]
    pulled = pull_bundle(f"{url}#prod", tmp_path / "x", options)
    assert tree(pulled.directory) == tree(one)
    assert not handler.broken


def test_objects_that_lie(one, s3, tmp_path):
    import s3fs

    options, _ = s3
    push_bundle(one, "s3://models#prod", options)
    large = read(one).file("report/extra-0.bin")
    fs, key = s3fs.S3FileSystem(**options.storage), f"models/blobs/sha256/{large.sha256}.1"
    whole = fs.cat_file(key)
    for content, message in (
        (whole + b"x", "in the registry is too large"),
        (whole[:-1], "has 9999 bytes of 10000"),
        (bytes(len(whole)), "file 'report/extra-0.bin' was altered"),
    ):
        fs.pipe_file(key, content)
        with pytest.raises(BundleInvalid, match=message):
            pull_bundle("s3://models#prod", tmp_path / "x", options)
    assert push_bundle(one, "s3://models#prod", options, again=True).kept_parts == 0
    pull_bundle("s3://models#prod", tmp_path / "x", options)
