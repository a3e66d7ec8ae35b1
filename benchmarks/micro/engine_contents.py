"""Contents of a serialized engine: constants, source of generated kernels, compiled graphs.

Seen in TensorRT for RTX 1.7.1, and repeated by ``benchmarks/micro/engine_size.py``:

* Constants are stored once, in the type of the computation. An FP8 plan saves one byte per weight of its
sites against
  BF16, to 1 %.
* Every generated kernel is stored as CUDA source of 0.13 to 0.2 MB, of which 0.13 MB is a common preamble.
Kernels that
  differ only in a literal argument, such as the scale of a Q, are stored separately.
* An FP8 product needs a generated kernel for its epilogue, where a BF16 product becomes a fusion described in
3 kB. A
  plan with few weights therefore enlarges the file by about 0.15 MB per site.
* No build setting changes this: profiling verbosity, auxiliary streams, optimization and tiling level, timing
and
  compilation cache, weight streaming. Stripped and refittable engines cannot be built without a GPU.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.engines.tensorrt.compiled_graph import compiled_graph_texts, parse_compiled_graph

SOURCE = re.compile(rb"#(?:undef|ifdef) __HAS_FP8\n[\t\n\r\x20-\x7e]+")


@dataclass(frozen=True)
class EngineContents:
    """Contents of an engine file, in bytes.

    Attributes:
        constants: Size of the constants by the compiler's element type: ``fp8_e4m3``, ``bf16``, …
    """

    total: int
    constants: Mapping[str, int]
    kernels: int
    sources: int
    graphs: int

    @property
    def rest(self) -> int:
        """Remaining size."""
        return self.total - sum(self.constants.values()) - self.sources - self.graphs


def read_contents(engine: Path) -> EngineContents:
    """Measure the parts of a serialized engine.

    Raises:
        EngineError: A compiled graph in it cannot be parsed.
    """
    with engine.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        sources = [match.end() - match.start() for match in SOURCE.finditer(data)]
    texts = compiled_graph_texts(engine)
    constants: Counter[str] = Counter()
    for text in texts:
        for tensor in parse_compiled_graph(text).tensors.values():
            constants[tensor.type] += tensor.constant_bytes
    return EngineContents(
        total=engine.stat().st_size,
        constants={kind: size for kind, size in constants.items() if size},
        kernels=len(sources),
        sources=sum(sources),
        graphs=sum(map(len, texts)),
    )
