"""An engine whose products an operator of another package computes: compiled ahead of time, loaded and run.

The operator is a stand-in for FBGEMM's, on the CPU (`packaged_operators`); what compiles the call by name and
what finds the operator again is PyTorch's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from packaged_engines import compiled, expected, two_linears  # noqa: E402
from packaged_operators import FBGEMM, FITTING, FOUND, calls, forget, installed, write_distribution  # noqa: E402
from tiny_models import TinyModel  # noqa: E402

from loka_onnx.core.formats import Precision  # noqa: E402
from loka_onnx.engines.inductor.kernels.products import PackageProduct  # noqa: E402
from loka_onnx.engines.inductor.operator_packages import find_packages  # noqa: E402
from loka_onnx.engines.inductor.package import NeededPackage, read_engine  # noqa: E402
from loka_onnx.engines.inductor.session import open_inductor  # noqa: E402
from loka_onnx.engines.inductor.site_precision import read_site_precisions  # noqa: E402
from loka_onnx.errors import MissingPackage  # noqa: E402

pytestmark = pytest.mark.slow

ROWS, TENSOR = FBGEMM.operators
CHOICES = {"fc0": PackageProduct(FOUND, ROWS, False), "fc1": PackageProduct(FOUND, TENSOR, True)}


@dataclass(frozen=True)
class Built:
    model: TinyModel
    site: Path
    engine: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("packaged")
    model, site = two_linears(folder / "model"), write_distribution(folder / "site", f"{FITTING}.0")
    with installed(site):
        assert find_packages(torch.__version__) == (FOUND,)
        yield Built(model, site, compiled(model, folder / "engines" / "e", "cpu", CHOICES))


def test_it_answers_as_float64_does(built: Built) -> None:
    x = np.load(built.model.sample)["x"]
    with open_inductor(built.engine, "cpu") as session:
        for rows in (1, 5, 16):
            calls().clear()
            found = session.run({"x": x[:rows]})["out"]
            assert calls() == [("f8f8bf16_rowwise", False), ("f8f8bf16", True)]
            # A sum in FP32 may be rounded to the next number of BF16.
            np.testing.assert_allclose(found, expected(built.model, x[:rows]), rtol=2.0**-7, atol=1e-6)


def test_it_says_what_it_needs_and_which_operators_multiply_its_sites(built: Built) -> None:
    needed = NeededPackage("fbgemm-gpu-genai", f"{FITTING}.0", FBGEMM.module)
    assert read_engine(built.engine).packages == (needed,)
    found = read_site_precisions(built.engine, [(site, Precision.FP8) for site in built.model.sites])
    assert [(site.engaged, site.evidence) for site in found] == [
        (True, "exported program: fbgemm::f8f8bf16_rowwise"),
        (True, "exported program: fbgemm::f8f8bf16 with fast accumulation"),
    ]


def test_it_loads_where_the_package_is_and_not_where_it_is_missing(built: Built) -> None:
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [each for each in sys.path if each != str(built.site)])
        with pytest.raises(MissingPackage, match=r"e\.pt2: (?s:.*)pip install fbgemm-gpu-genai=="):
            open_inductor(built.engine, "cpu")
    assert FBGEMM.module not in sys.modules
    x = np.load(built.model.sample)["x"]
    with open_inductor(built.engine, "cpu") as session:
        assert session.run({"x": x})["out"].shape == (16, 32)
    assert len(calls()) == 2
