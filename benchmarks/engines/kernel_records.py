"""Kernel times out of build logs: what the engines of a case really run, for `planning/records`.

When an engine is built, every kernel that could compute a product is timed at every batch size, with what
follows inside or behind it (`engines.inductor.compile.chosen_strategy`, which prints them). Each program gets
the fastest; its time is taken here, in BF16 from the log of the BF16 engine, in FP8 from those of engines
with FP8. What an FP8 product reads comes in FP8, and the cast is no part of its time.

Sites of one shape differ by what follows them, and a record has one time for a shape: the mean over sites
and builds, so that the times of a model's products add up to what was measured.

    python -m benchmarks.engines.kernel_records --logs DIR --case wukong-small --case dlrm-dcnv2 \
        --date 2026-11-22 --version torch=… --note … --into loka_onnx/planning/records/nvidia-h100.json
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.engines.cases import CASES, Exported, export_case
from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.site import Site
from loka_onnx.core.timing import PRODUCT, Kernel, KernelTiming, Provenance, Shape, TimingRecords
from loka_onnx.planning.site_speed import ALIGNMENT
from loka_onnx.planning.timings import read_records
from loka_onnx.transforms.sequence import apply_mods

BACKEND = "inductor"
NOTE = (
    "from the logs of building the engines of {cases}: at each batch size the fastest kernel tried (Triton "
    "tiles, cuBLASLt), with what follows the product (bias, activation, sum, the cast of its result), CUDA "
    "graph replays, median; mean over sites of a shape and over builds"
)
_FLOAT8, _HALF = "float8-product", "half-product"
_FUSED = re.compile(rf"^({_FLOAT8}|{_HALF}): (?!declined )(.+)$")
_TIMED = re.compile(r"^(.+?): (.+?): (\d[^;]* µs at batch [^;]*); error \S+$")
_TIME = re.compile(r"([\d.]+) µs at batch (\d+)")
ROWS = 64
"""Rows that mods are checked on."""


@dataclass(frozen=True)
class BuildLog:
    """What a build printed.

    Attributes:
        float8: Sites whose product runs in FP8.
        half: Sites whose product runs in the base precision, with what follows.
        us: By site and batch size the time of the fastest kernel, microseconds.
    """

    float8: frozenset[str]
    half: frozenset[str]
    us: Mapping[str, Mapping[int, float]]

    @classmethod
    def read(cls, text: str) -> BuildLog:
        """A log; lines of other things are passed over."""
        fused: dict[str, set[str]] = {_FLOAT8: set(), _HALF: set()}
        us: dict[str, dict[int, float]] = {}
        for line in text.splitlines():
            if found := _FUSED.match(line):
                fused[found[1]].update(found[2].split(", "))
            elif found := _TIMED.match(line):
                of_site = us.setdefault(found[1], {})
                for took, batch in _TIME.findall(found[3]):
                    of_site[int(batch)] = min(of_site.get(int(batch), float(took)), float(took))
        return cls(frozenset(fused[_FLOAT8]), frozenset(fused[_HALF]), us)


def product_times(
    logs: Iterable[BuildLog], sites: Sequence[Site], device: str, provenance: Provenance
) -> tuple[KernelTiming, ...]:
    """Times of the products of one model, one for each precision and shape.

    Args:
        logs: Logs of its engines in BF16, with and without FP8 sites. Of an engine with FP8, times in BF16
            are left out: there a product may quantize for the next one.
        sites: Its sites.
        device: As run files name it.
        provenance: Where the times come from.
    """
    by_name = {site.name: site for site in sites if not (site.k % ALIGNMENT or site.n % ALIGNMENT)}
    found: dict[tuple[Precision, Shape], list[float]] = {}
    for log in logs:
        precision, names = (Precision.FP8, log.float8) if log.float8 else (Precision.BF16, log.half)
        for name in names & log.us.keys() & by_name.keys():
            site = by_name[name]
            for batch, us in log.us[name].items():
                found.setdefault((precision, Shape(site.rows * batch, site.n, site.k)), []).append(us)
    scales = {Precision.FP8: Granularity.PER_TENSOR}
    return tuple(
        KernelTiming(
            Kernel(device, BACKEND, PRODUCT, precision, scales.get(precision)),
            shape,
            round(fmean(us), 3),
            None,
            provenance,
        )
        for (precision, shape), us in found.items()
    )


def logs_of(case: str, directory: Path) -> Iterator[BuildLog]:
    """Logs of a case: ``<case>-BF16.log``, and those with FP8 in their name.

    Raises:
        FileNotFoundError: The log of the BF16 engine is missing, without which FP8 is held against nothing.
    """
    for path in (directory / f"{case}-BF16.log", *sorted(directory.glob(f"{case}-*FP8*.log"))):
        yield BuildLog.read(path.read_text(encoding="utf-8"))


def sites_of(exported: Exported, directory: Path) -> tuple[Site, ...]:
    """Sites of a case after mods, as its engines are built."""
    return apply_mods(exported.model, [exported.rows(ROWS)], directory / "modified.onnx").model.sites


def merged(known: Iterable[KernelTiming], more: Iterable[KernelTiming]) -> TimingRecords:
    """Both; of two times of one kernel on one shape the latter stands."""
    found = {(timing.kernel, timing.shape): timing for timing in (*known, *more)}
    return TimingRecords.of(found.values())


def main() -> None:
    """Add the times of cases to a document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--logs", type=Path, required=True, help="directory of build logs, <case>-<engine>.log"
    )
    parser.add_argument("--case", action="append", required=True, choices=sorted(CASES), dest="cases")
    parser.add_argument("--into", type=Path, required=True, help="document to add to")
    parser.add_argument("--device", default="nvidia-h100", help="as run files name it")
    parser.add_argument("--device-name", default="NVIDIA H100 80GB HBM3", help="as its driver names it")
    parser.add_argument("--date", required=True, help="day of the builds")
    parser.add_argument(
        "--version", action="append", default=[], help="name=version, of libraries and driver"
    )
    parser.add_argument("--note", default="", help="what else a reader must know, of how they were timed")
    options = parser.parse_args()
    versions = dict(each.split("=", 1) for each in options.version)
    found: list[KernelTiming] = []
    for case in options.cases:
        note = "; ".join(filter(None, (NOTE.format(cases=case), options.note)))
        source = Provenance(options.device_name, versions, "not fixed, not recorded", options.date, note)
        with TemporaryDirectory() as folder:
            sites = sites_of(export_case(CASES[case], Path(folder)), Path(folder))
        found += product_times(logs_of(case, options.logs), sites, options.device, source)
    known = read_records(options.into) if options.into.exists() else ()
    serde.write(merged(known, found), options.into)


if __name__ == "__main__":
    main()
