"""A write over and over in a child that is killed at random moments; a script, because it forks.

    python killed_writes.py JOB PLACE KILLS CONTENTS OLD NEW KEY

The child is forked from a process that has imported everything, so that a round takes as long as a write, and
kills fall into writes. Prints what happened as JSON.
"""

import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from loka_onnx.bundle.format.archive import pack_bundle, unpack, verify_path
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.registry import TransferOptions, pull_bundle, push_bundle, resolve
from loka_onnx.bundle.registry import names as registry_names
from loka_onnx.bundle.signing import sign_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.digests import digest_file

registry_names.PART_BYTES = 2_000
OPTIONS = TransferOptions(threads=3)
job, place, kills, contents, old, new, key = sys.argv[1], *map(Path, sys.argv[2:])
one, two = pickle.loads(contents.read_bytes())
registry = place.parent.parent / "registry"
folder = place.parent


def push(bundle: Path) -> None:
    """All that the bundle of the name does not hold is sent anew."""
    kept = next(
        each for each in (old, new) if digest_file(each / "manifest.json") == resolve(f"{registry}#prod")
    )
    for part in (registry / "blobs/sha256").iterdir():
        if part.name.split(".")[0] not in {file.sha256 for file in verify_bundle(kept).files}:
            part.unlink()
    if kept != bundle:
        shutil.rmtree(registry / "bundles" / digest_file(bundle / "manifest.json"), ignore_errors=True)
    push_bundle(bundle, f"{registry}#prod", OPTIONS)


def act(number: int) -> None:
    bundle = (old, new)[number]
    match job:
        case "write" | "write signed":
            write_bundle((one, two)[number], place, key=key if "signed" in job else None)
        case "pack":
            pack_bundle(bundle, place)
        case "unpack":
            unpack(bundle, place)
        case "sign":
            sign_bundle(place, key)
        case "push":
            push(bundle)
        case "pull":
            pull_bundle(f"{registry}#{number}", place, OPTIONS)


def look() -> str:
    if job == "push":
        pull_bundle(f"{registry}#prod", place, OPTIONS)
    return verify_path(place).manifest.seal


if job == "push":
    push_bundle(old, f"{registry}#prod", OPTIONS)
    folder = registry / "uploads"
for number, bundle in enumerate((old, new) if job == "pull" else ()):
    push_bundle(bundle, f"{registry}#{number}", OPTIONS)
act(0)
start = time.perf_counter()
for number in range(4):
    act(number % 2)
longest = (time.perf_counter() - start) / 2
whole = set()
for number in (0, 1):
    act(number)
    whole.add(look())
random.seed(5)
seen, staged = set(), 0
for kill in range(int(str(kills))):
    child = os.fork()
    if child == 0:
        try:
            number = kill
            while True:
                act(number % 2)
                number += 1
        finally:
            os._exit(3)
    # A write of a child that was just forked takes longer than one of those timed.
    time.sleep(random.uniform(0, min(3 * longest, 0.3)))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    staged += any(".staged-" in path.name for path in folder.iterdir())
    seal = look()
    assert seal in whole, seal
    seen.add(seal)
act(0)
look()
left = [path.name for path in folder.iterdir() if path != place]
print(json.dumps({"states": len(whole), "seen": len(seen), "staged": staged, "left": left}))
