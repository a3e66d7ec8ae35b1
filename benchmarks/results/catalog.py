"""Which record is shown where, under which title, by which function, held against which aims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.results import accuracy, aims, costs, engines, generic, peers
from benchmarks.results.records import Record


@dataclass(frozen=True)
class Page:
    """One page of results.

    Attributes:
        address: Name of its file.
        title: Its title.
        text: What its records have in common.
    """

    address: str
    title: str
    text: str


ENGINES = Page(
    "engines",
    "Engines on a GPU",
    "Ratios of times that were taken in turns within one run. *Today* is the exported model "
    "untouched, in BF16 "
    "or FP16, as PyTorch compiles it by default.",
)
ACCURACY = Page(
    "accuracy",
    "Accuracy and its statistics",
    "What FP8 costs on held-out rows, and whether the measures and intervals that decide about it hold.",
)
PEERS = Page(
    "peers",
    "Other tools",
    "The same models and rows through other tools, each in an environment of its own. Whoever loses "
    "is shown.",
)
STAGES = Page(
    "stages", "Cost of the stages", "Time and memory of calibration, rewriting, builds and refreshes."
)
FLEET = Page("fleet", "On a fleet host", "What loading, serving and watching a bundle cost.")
OTHERS = Page("others", "Other records", "Records without a page of their own: their figures as they are.")
PAGES = (ENGINES, ACCURACY, PEERS, STAGES, FLEET, OTHERS)


@dataclass(frozen=True)
class Entry:
    """How records of one name, or one pattern of names, are shown.

    Attributes:
        pattern: Of names.
        page: Where.
        title: ``{}`` stands for what the pattern's star matched.
        module: The benchmark, whose docstring says what is measured and how.
        options: What follows the module in the command; likewise.
        render: Figures as Markdown.
        aims: What the figures are held against.
    """

    pattern: str
    page: Page
    title: str
    module: str
    render: Callable[[Record], str] = generic.render
    aims: aims.Aims | None = None
    options: str = ""

    def matched(self, name: str) -> str:
        """What the star stands for."""
        return name.removeprefix(self.pattern.partition("*")[0])


ENTRIES = (
    Entry(
        "trained-*",
        ENGINES,
        "Speed and accuracy of the same engines: {}",
        "benchmarks.engines.trained",
        engines.trained,
        aims.trained,
        "--case {}",
    ),
    Entry(
        "speed-*",
        ENGINES,
        "Speed only, random weights: {}",
        "benchmarks.engines.speed",
        engines.speed,
        aims.speed,
        "--case {}",
    ),
    Entry(
        "zoo-engines",
        ENGINES,
        "The whole product on the zoo",
        "benchmarks.engines.zoo",
        engines.zoo,
        None,
        "run",
    ),
    Entry(
        "prediction-error",
        ENGINES,
        "Predicted against measured latency",
        "benchmarks.engines.prediction_error",
        engines.prediction_error,
        aims.predictions,
    ),
    Entry(
        "attention-times",
        ENGINES,
        "Where fused attention pays",
        "benchmarks.engines.attention_times",
        engines.attention,
    ),
    Entry("site_shapes", ENGINES, "What the shape mods gain", "benchmarks.micro.site_shapes"),
    Entry(
        "movielens1m",
        ACCURACY,
        "Plans on MovieLens 1M",
        "benchmarks.pipeline.movielens1m",
        accuracy.movielens,
        aims.movielens,
    ),
    Entry(
        "additivity",
        ACCURACY,
        "Do the effects of sites add up",
        "benchmarks.pipeline.additivity",
        accuracy.additivity,
        aims.additivity,
    ),
    Entry(
        "weight_rounding",
        ACCURACY,
        "Weights rounded by what they do to the output",
        "benchmarks.pipeline.weight_rounding",
        accuracy.weight_rounding,
        aims.weight_rounding,
    ),
    Entry(
        "interval_coverage",
        ACCURACY,
        "Coverage of intervals",
        "benchmarks.pipeline.interval_coverage",
        accuracy.coverage,
        aims.coverage,
    ),
    Entry(
        "interval_coverage_of_plans",
        ACCURACY,
        "Coverage of intervals of plans in INT8 and both formats",
        "benchmarks.pipeline.interval_coverage",
        accuracy.coverage,
        aims.coverage,
        "--runs DIR --data DIR",
    ),
    Entry(
        "zoo_shares",
        ACCURACY,
        "Share in eight bits of the zoo on MovieLens 1M",
        "benchmarks.engines.zoo_shares",
        accuracy.zoo_shares,
        options="--data DIR --checkpoints DIR --directory DIR",
    ),
    Entry("demo_table", ACCURACY, "The demo's table", "benchmarks.pipeline.demo_table"),
    Entry(
        "public_rankers*",
        ACCURACY,
        "Rankers of public libraries{}",
        "benchmarks.public_rankers.table",
        accuracy.public_rankers,
    ),
    Entry(
        "first_hour",
        STAGES,
        "From torch.onnx.export to a served bundle",
        "benchmarks.public_rankers.first_hour",
        costs.first_hour,
        options="--place DIRECTORY --libraries DIRECTORY",
    ),
    Entry(
        "run_wall",
        ACCURACY,
        "Time of a run, before and after the ladder of plans",
        "benchmarks.public_rankers.table",
        accuracy.run_wall,
    ),
    Entry(
        "interval_tails",
        ACCURACY,
        "Ends of intervals where tails are heavy or groups few",
        "benchmarks.pipeline.interval_tails",
        accuracy.tails,
    ),
    Entry(
        "gpu_rankers",
        ENGINES,
        "Rankers of public libraries beside torch.compile",
        "benchmarks.public_rankers.on_gpu",
        engines.gpu_rankers,
    ),
    Entry(
        "gpu_formats",
        ENGINES,
        "Plans of a run with both eight-bit formats on a GPU",
        "benchmarks.public_rankers.on_gpu",
        engines.gpu_formats,
        options="plans --to DIRECTORY --work DIRECTORY",
    ),
    Entry(
        "rtx_formats",
        ENGINES,
        "Sites in INT8 and FP8 of engines for RTX GPUs",
        "benchmarks.engines.rtx_formats",
        engines.rtx_formats,
        options="--runs DIR --directory DIR",
    ),
    Entry(
        "host_requests",
        ENGINES,
        "Requests from host memory",
        "benchmarks.micro.host_requests",
        engines.host_requests,
    ),
    Entry(
        "choice_errors",
        ENGINES,
        "Equal engines, and engines that truly differ",
        "benchmarks.engines.choice_errors",
        engines.choice_errors,
    ),
    Entry("peers*", PEERS, "FP8 by other tools{}", "benchmarks.peers.compare", peers.render),
    Entry("cpu_engines", PEERS, "INT8 on the CPU", "benchmarks.peers.cpu_engines", peers.cpu_engines),
    Entry(
        "shared_users",
        FLEET,
        "A user's features once",
        "benchmarks.micro.shared_users",
        accuracy.shared_users,
    ),
    Entry(
        "int8_tables",
        ACCURACY,
        "Embedding tables in INT8",
        "benchmarks.micro.int8_tables",
        accuracy.int8_tables,
    ),
    Entry(
        "peer_calibration",
        PEERS,
        "Calibration beside NVIDIA Model Optimizer",
        "benchmarks.peers.model_optimizer_calibration",
        costs.peer_calibration,
    ),
    Entry(
        "calibration_cost",
        STAGES,
        "Cost of calibration",
        "benchmarks.pipeline.calibration_cost",
        costs.calibration,
        aims.calibration,
    ),
    Entry(
        "embedding_tables",
        STAGES,
        "Tables larger than half of the memory",
        "benchmarks.pipeline.embedding_tables",
        aims=aims.tables,
    ),
    Entry("ray_speedup", STAGES, "Calibration on a Ray cluster", "benchmarks.pipeline.ray_speedup"),
    Entry(
        "refresh_time",
        STAGES,
        "Refresh of a retrained checkpoint",
        "benchmarks.pipeline.refresh_time",
        costs.refresh,
        aims.refresh,
    ),
    Entry(
        "rewrite_time",
        STAGES,
        "Rewriting large graphs",
        "benchmarks.micro.rewrite_time",
        costs.rewriting,
        aims.rewriting,
    ),
    Entry("outlook", STAGES, "Expected and actual time of a run", "benchmarks.pipeline.outlook"),
    Entry("rewrite_large", STAGES, "Rewriting a large model", "benchmarks.micro.rewrite_large"),
    Entry(
        "engine_size",
        STAGES,
        "Size of TensorRT for RTX engines",
        "benchmarks.micro.engine_size",
        costs.engine_size,
        aims.size,
    ),
    Entry(
        "report_size", STAGES, "The report of a large model", "benchmarks.micro.report_size", aims=aims.stated
    ),
    Entry(
        "runtime_overhead",
        FLEET,
        "What the runtime adds to a call",
        "benchmarks.micro.runtime_overhead",
        costs.overhead,
        aims.overhead,
    ),
    Entry(
        "serve_soak", FLEET, "The server under load", "benchmarks.pipeline.serve_soak", costs.soak, aims.soak
    ),
    Entry(
        "drift_alarms", FLEET, "Alarms of drift", "benchmarks.pipeline.drift_alarms", costs.drift, aims.drift
    ),
    Entry("mutants", OTHERS, "Small defects that the tests see", "benchmarks.micro.mutants"),
    Entry(
        "compare_with_itself",
        FLEET,
        "A model compared with its own copy",
        "benchmarks.pipeline.compare_with_itself",
    ),
)


def entry_of(name: str) -> Entry | None:
    """How a record is shown; None where the catalog does not know it."""
    return next((entry for entry in ENTRIES if fnmatchcase(name, entry.pattern)), None)
