"""`loka-onnx doctor`: what this machine can build and run, and why not the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.cli.diagnosis import Diagnosis, diagnose
from loka_onnx.cli.terminal import terminal_of


def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can build and run, per backend, and how to get what is missing."""
    out = terminal_of(context).out
    diagnosis = diagnose()
    if as_json:
        out.out(json.dumps(asdict(diagnosis), indent=2))
        return
    for line in _lines(diagnosis):
        out.print(line, soft_wrap=True)


def _lines(diagnosis: Diagnosis) -> Iterator[Text]:
    machine = diagnosis.machine
    yield Text(
        f"loka-onnx {machine.loka_onnx}, Python {machine.python}, {machine.system}, "
        f"{machine.cores} cores, {machine.memory_gb:g} GB"
    )
    yield Text(f"GPUs: {', '.join(machine.gpus) or 'none'}")
    yield _heading("Backends")
    for name, can in diagnosis.backends.items():
        builds = "builds" if can.can_build else "does not build"
        runs = "runs" if can.can_run else "does not run"
        where = f" on {', '.join(can.devices)}" if can.devices else ""
        works = can.can_build and can.can_run
        yield _entry(name, can.version, f"{builds}, {runs}{where}", is_good=works, is_partial=can.can_build)
        if not works:
            yield _note(can.reason)
            yield _note(f"→ {can.remedy}")
    yield _heading("Optional packages")
    for package in diagnosis.packages:
        yield _entry(package.name, package.version, package.use, is_good=bool(package.version))
        if package.remedy:
            yield _note(f"→ {package.remedy}")


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _entry(name: str, version: str, what: str, *, is_good: bool, is_partial: bool = False) -> Text:
    mark = ("✓", "green") if is_good else ("~", "yellow") if is_partial else ("✗", "red")
    return Text.assemble("  ", mark, f" {name:<13} {version or 'missing':<12} {what}")


def _note(text: str) -> Text:
    return Text(f"    {text}", style="dim")
