"""Registries of bundles in any place that fsspec writes: a directory, s3://, gs:// (docs/registry.md)."""

from loka_onnx.bundle.registry.layout import Reference, parse_reference
from loka_onnx.bundle.registry.names import NamedBundle, list_names, promote, resolve
from loka_onnx.bundle.registry.pull import PullResult, pull_bundle
from loka_onnx.bundle.registry.push import PushResult, push_bundle
from loka_onnx.bundle.registry.store import TransferOptions

__all__ = [
    "NamedBundle",
    "PullResult",
    "PushResult",
    "Reference",
    "TransferOptions",
    "list_names",
    "parse_reference",
    "promote",
    "pull_bundle",
    "push_bundle",
    "resolve",
]
