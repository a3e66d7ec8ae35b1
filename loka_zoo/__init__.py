"""Ranking models to build, measure and demonstrate with: DLRM, DCNv2, Wukong, InterFormer.

`training` and `checkpoint` import PyTorch; this module, `spec` and `registry` do not.
"""

from loka_zoo.registry import MODEL_NAMES, create
from loka_zoo.spec import PRESETS, FeatureSpec

__all__ = ["MODEL_NAMES", "PRESETS", "FeatureSpec", "create"]
