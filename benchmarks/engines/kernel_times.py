r"""Times of products alone, for `planning/records`: a grid of shapes, and those of the production cases.

Which shapes a case has is read from its model where there is time for that (a large one takes a minute)::

    python -m benchmarks.engines.kernel_times shapes --case dlrm-dcnv2 wukong-large --to SHAPES.json

and they are timed on the device as `loka-onnx tune` does, quietly, that is with no build beside it::

    python -m benchmarks.engines.kernel_times time --shapes SHAPES.json \
        --into loka_onnx/planning/records/nvidia-h100.json

What the document held of a kernel on a shape is replaced; other times stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.engines.cases import CASES, export_case
from benchmarks.engines.kernel_records import merged, sites_of
from loka_onnx.core import serde
from loka_onnx.core.serde import write_text
from loka_onnx.core.timing import Shape
from loka_onnx.engines.tuning import KernelTimer
from loka_onnx.pipeline.tuning import shapes_of, tune_shapes
from loka_onnx.planning.timings import TimingDatabase, read_records

ROWS = (256, 1024, 4096)
WEIGHTS = (
    (64, 64),
    (256, 256),
    (512, 512),
    (512, 1024),
    (1024, 1024),
    (2048, 2048),
    (1024, 8192),
    (8192, 1024),
    (4096, 4096),
)
"""N and K of the grid, on which times of other shapes are predicted."""


def main() -> None:
    """Write the shapes, or time them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("shapes")
    listing.add_argument("--case", nargs="+", choices=sorted(CASES), required=True)
    listing.add_argument("--to", type=Path, required=True)
    timing = verbs.add_parser("time")
    timing.add_argument("--shapes", type=Path, required=True)
    timing.add_argument("--device", help="as run files name it; what is found where not given")
    timing.add_argument("--rounds", type=int, default=9)
    timing.add_argument("--into", type=Path, required=True, help="document to add to")
    options = parser.parse_args()
    if options.verb == "shapes":
        grid = {Shape(m, n, k) for m, (n, k) in product(ROWS, WEIGHTS)}
        shapes = grid.union(*(shapes_of_case(name) for name in options.case))
        write_text(json.dumps([[each.m, each.n, each.k] for each in sorted(shapes)]), options.to)
        return
    shapes = {Shape(*each) for each in json.loads(options.shapes.read_text(encoding="utf-8"))}
    time_into(shapes, options)


def shapes_of_case(name: str) -> tuple[Shape, ...]:
    """Shapes of the products of a case after mods, at its batch sizes."""
    case = CASES[name]
    with TemporaryDirectory() as folder:
        sites = sites_of(export_case(case, Path(folder)), Path(folder))
    return shapes_of(sites, case.batches)


def time_into(shapes: Iterable[Shape], options: argparse.Namespace) -> None:
    """Time them all, and add the times to a document."""
    timer = KernelTimer(options.device, options.rounds)
    with TemporaryDirectory() as folder:
        database = Path(folder) / "timings.sqlite"
        done = tune_shapes(sorted(shapes), database, timer)
        with TimingDatabase(database) as opened:
            found = opened.read()
    for each in done.refused:
        print(f"{each.kernel} on {each.shape}: {each.reason}")
    known = read_records(options.into) if options.into.exists() else ()
    serde.write(merged(known, found), options.into)
    print(f"{done.measured} times on {done.device} in {done.seconds:.0f} s")


if __name__ == "__main__":
    main()
