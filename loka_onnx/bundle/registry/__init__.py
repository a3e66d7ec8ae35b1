"""Registries of bundles in any place that fsspec writes: a directory, s3://, gs:// (docs/registry.md)."""

from loka_onnx.bundle.registry.names import NamedBundle, list_names, parse_reference, promote, resolve
from loka_onnx.bundle.registry.store import TransferOptions
from loka_onnx.bundle.registry.transfer import pull_bundle, push_bundle

__all__ = [
    "NamedBundle",
    "TransferOptions",
    "list_names",
    "parse_reference",
    "promote",
    "pull_bundle",
    "push_bundle",
    "resolve",
]
