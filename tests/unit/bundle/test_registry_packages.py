"""What a registry says where a package is missing."""

import sys

import pytest

from loka_onnx.bundle.registry import resolve
from loka_onnx.errors import MissingPackage


def test_without_fsspec_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingPackage, match=r"pip install 'loka-onnx\[registry\]'"):
        resolve(f"{tmp_path}#prod")


def test_a_file_system_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingPackage, match="'gs://bucket' needs a package that is not installed"):
        resolve("gs://bucket#prod")
