"""Ranking models to build, measure and demonstrate with: DLRM, DCNv2, Wukong, InterFormer.

`training` and the models import PyTorch; this module, `spec` and `builders` do not.
"""

from loka_zoo.builders import MODEL_NAMES, create
from loka_zoo.spec import PRESETS, FeatureSpec

__all__ = ["MODEL_NAMES", "PRESETS", "FeatureSpec", "create"]
