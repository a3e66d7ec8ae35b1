"""The timing cache's file: one for each device and version, merged, replaced as a whole, never fatal.

The builder's side is a double in which a cache is the header of its device and a set of measured tactics,
with the rules of `ITimingCache.combine` and `IBuilderConfig.set_timing_cache`; the contract tests repeat the
calls on TensorRT for RTX.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from loka_onnx.engines.tensorrt.build import TimingCache, timing_cache_file


class FakeCache:
    def __init__(self, content: bytes) -> None:
        header, *entries = content.split()
        self.header, self.entries = header, set(entries)

    def combine(self, other: FakeCache, ignore_mismatch: bool) -> bool:
        if ignore_mismatch or other.header != self.header:
            return False
        self.entries |= other.entries
        return True

    def serialize(self) -> bytearray:
        # A buffer, as `IHostMemory` is one.
        return bytearray(b" ".join([self.header, *sorted(self.entries)]))


class FakeConfig:
    """A builder's configuration on one device."""

    def __init__(self, device: bytes = b"H100") -> None:
        self.device = device
        self.cache: FakeCache | None = None

    def create_timing_cache(self, content: bytes) -> FakeCache | None:
        if content.startswith(b"damaged"):
            return None
        return FakeCache(content or self.device)

    def set_timing_cache(self, cache: FakeCache, ignore_mismatch: bool) -> bool:
        if cache.header != self.device and not ignore_mismatch:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> FakeCache | None:
        return self.cache


def build(file: Path, *measured: bytes, device: bytes = b"H100") -> set[bytes]:
    """What a build began with; it measures some more."""
    config, cache = FakeConfig(device), TimingCache(file)
    cache.attach(config)
    assert config.cache is not None
    began = set(config.cache.entries)
    config.cache.entries |= set(measured)
    cache.keep(config)
    return began


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "timing" / "h100.cache"


def test_a_build_begins_with_what_others_measured(file):
    assert build(file, b"a", b"b") == set()
    assert build(file, b"c") == {b"a", b"b"}
    assert build(file) == {b"a", b"b", b"c"}
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".cache", ".lock"]
    config, cache = FakeConfig(), TimingCache(file)
    cache.attach(config)
    build(file, b"other")
    assert config.cache is not None
    config.cache.entries |= {b"own"}
    cache.keep(config)
    assert build(file) == {b"a", b"b", b"c", b"other", b"own"}


def test_processes_lose_nothing_of_one_another(file):
    context = multiprocessing.get_context("fork")
    entries = [f"tactic{number}".encode() for number in range(6)]
    processes = [context.Process(target=build, args=(file, entry)) for entry in entries]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert build(file) == set(entries)


@pytest.mark.parametrize("content", [b"damaged", b"A100 x y"])
def test_a_cache_that_is_refused_is_begun_anew(file, content, capsys):
    file.parent.mkdir()
    file.write_bytes(content)
    assert build(file, b"a") == set()
    assert build(file) == {b"a"}
    assert "of another device or version, or damaged: begun anew" in capsys.readouterr().out


def test_each_device_has_a_file_and_one_that_cannot_be_written_fails_no_build(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LOKA_ONNX_CACHE", str(tmp_path))
    h100 = "NVIDIA H100 80GB HBM3"
    file = timing_cache_file("tensorrt", "10.16.1.11", h100, "sm90")
    assert file == tmp_path / "timing" / "tensorrt-10.16.1.11" / "NVIDIA-H100-80GB-HBM3-sm90.cache"
    others = (("tensorrt", "11.4.0", h100), ("tensorrt", "10.16.1.11", "NVIDIA H100 PCIe"))
    others = (*others, ("tensorrt_rtx", "10.16.1.11", h100))
    assert len({file, *(timing_cache_file(*other, "sm90") for other in others)}) == 4
    (tmp_path / "file").write_bytes(b"")
    build(tmp_path / "file" / "h100.cache", b"a")
    assert "is not kept: " in capsys.readouterr().out
