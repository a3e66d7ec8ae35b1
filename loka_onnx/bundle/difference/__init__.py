"""What two bundles say differently."""

from loka_onnx.bundle.difference.manifests import BundleFacts, diff_bundles, difference_of

__all__ = ["BundleFacts", "diff_bundles", "difference_of"]
