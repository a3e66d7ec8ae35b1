"""Pushes and pulls that are killed at random moments; a script, because it forks.

    python killed_registry.py push|pull BUNDLES PLACE KILLS

BUNDLES holds bundles that differ. Of each round the child moves the next one, and is killed; what is there
afterwards must be whole, and the one of before or the next one. Prints what happened as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from altered import tree

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.registry import TransferOptions, pull_bundle, push_bundle
from loka_onnx.bundle.registry import layout as registry_layout
from loka_onnx.core.digests import digest_bytes

OPTIONS = TransferOptions(threads=3)
registry_layout.PART_BYTES = 20_000


def killed(work: Callable[[], object], after: float) -> bool:
    """Runs `work` in a child that is killed after so many seconds; whether that was before its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


def digest(bundle: Path) -> str:
    return digest_bytes((bundle / "manifest.json").read_bytes())


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def push_rounds(bundles: list[Path], place: Path, kills: int) -> Counter[str]:
    registry, seen = place / "registry", Counter[str]()
    name = f"{registry}#prod"
    push_bundle(bundles[0], name, OPTIONS)
    longest = timed(lambda: push_bundle(bundles[1], name, OPTIONS))
    current = bundles[1]
    for number in itertools.takewhile(lambda _: seen["killed"] < kills, itertools.count()):
        upcoming = bundles[number % len(bundles)]
        # What only this bundle holds is sent anew, and so is its manifest.
        for part in (registry / "blobs" / "sha256").iterdir():
            if part.name.split(".")[0] not in {f.sha256 for f in verify_bundle(current).files}:
                part.unlink()
        if upcoming != current:
            shutil.rmtree(registry / "bundles" / digest(upcoming), ignore_errors=True)
        was_killed = killed(lambda b=upcoming: push_bundle(b, name, OPTIONS), random.uniform(0, longest))
        pulled = pull_bundle(name, place / "host" / "bundle", OPTIONS)
        assert pulled.digest in {digest(current), digest(upcoming)}, "neither the old bundle nor the new one"
        found = upcoming if pulled.digest == digest(upcoming) else current
        assert tree(pulled.directory) == tree(found)
        seen["killed" if was_killed else "finished"] += 1
        seen["new" if found is upcoming else "old"] += 1
        seen["leftovers"] += len(list((registry / "uploads").iterdir()))
        if found is not upcoming and number % 10 == 0:
            rest = push_bundle(upcoming, name, OPTIONS)
            seen["resumed parts"] += rest.kept_parts
            seen["sent parts"] += rest.sent_parts
            found = upcoming
        current = found
    push_bundle(current, name, OPTIONS)
    assert list((registry / "uploads").iterdir()) == []
    return seen


def pull_rounds(bundles: list[Path], place: Path, kills: int) -> Counter[str]:
    registry, seen = place / "registry", Counter[str]()
    host = place / "host" / "bundle"
    for number, bundle in enumerate(bundles):
        push_bundle(bundle, f"{registry}#{number}", OPTIONS)
    pull_bundle(f"{registry}#0", host, OPTIONS)
    longest = timed(lambda: pull_bundle(f"{registry}#1", host, OPTIONS))
    current = bundles[1]
    for number in itertools.takewhile(lambda _: seen["killed"] < kills, itertools.count()):
        index = number // 3 % len(bundles)
        upcoming, name = bundles[index], f"{registry}#{index}"
        was_killed = killed(lambda n=name: pull_bundle(n, host, OPTIONS), random.uniform(0, longest))
        verify_bundle(host)
        assert digest(host) in {digest(current), digest(upcoming)}, "neither the old bundle nor the new one"
        current = upcoming if digest(host) == digest(upcoming) else current
        assert tree(host) == tree(current)
        seen["killed" if was_killed else "finished"] += 1
        seen["new" if current is upcoming else "old"] += 1
        seen["leftovers"] += len(list(host.parent.iterdir())) - 1
    pull_bundle(f"{registry}#0", host, OPTIONS)
    pull_bundle(f"{registry}#1", host, OPTIONS)
    assert [p.name for p in host.parent.iterdir()] == ["bundle"]
    return seen


if __name__ == "__main__":
    verb, folder, where, count = sys.argv[1:]
    random.seed(7)
    rounds = {"push": push_rounds, "pull": pull_rounds}[verb]
    print(json.dumps(rounds(sorted(Path(folder).iterdir()), Path(where), int(count))))
