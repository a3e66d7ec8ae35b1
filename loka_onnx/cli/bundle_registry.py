"""`loka-onnx bundle push`, `pull`, `list`, `resolve`, `promote`: bundles in registries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka_onnx.bundle.registry import (
    NamedBundle,
    TransferOptions,
    list_names,
    parse_reference,
    promote,
    pull_bundle,
    push_bundle,
    resolve,
)
from loka_onnx.bundle.registry.names import name_problem
from loka_onnx.cli.outcome import shown
from loka_onnx.cli.progress import reported
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.errors import CheckFailed

_DEFAULTS = TransferOptions()

Bundle = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="The bundle, or its archive.", show_default=False)
]
Place = Annotated[
    str, typer.Argument(metavar="URL[#NAME]", help="s3://…, gs://… or a directory; #NAME names it there.")
]
Which = Annotated[str, typer.Argument(metavar="URL#NAME", help="The bundle: URL#NAME or URL#sha256:DIGEST.")]
Registry = Annotated[str, typer.Argument(metavar="URL", help="s3://…, gs://… or a directory.")]
Threads = Annotated[int, typer.Option(help="Parts under way at once; each takes 16 MiB of memory.", min=1)]


def push(
    context: typer.Context,
    bundle: Bundle,
    place: Place,
    again: Annotated[
        bool, typer.Option("--again", help="Send what the registry has as well, to mend it.")
    ] = False,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Copy a bundle to a registry; only what is missing there is sent, and the name moves last."""
    terminal = terminal_of(context)
    with reported(terminal, "push") as progress:
        result = push_bundle(bundle, place, TransferOptions(threads=threads, progress=progress), again=again)
    terminal.say(
        f"{shown(bundle)}: pushed to {parse_reference(place).shown} as sha256:{result.digest}\n"
        f"sent {result.sent_parts} parts, {result.sent_bytes:,} bytes; "
        f"{result.kept_parts} parts, {result.kept_bytes:,} bytes were there"
    )


def pull(
    context: typer.Context,
    which: Which,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where it goes.")],
    keys: Annotated[
        list[Path] | None,
        typer.Option("--key", help="A public key; one of those given must have signed the bundle."),
    ] = None,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Copy a bundle from a registry, check all of it, and let it take the place of an old one."""
    terminal = terminal_of(context)
    with reported(terminal, "pull") as progress:
        result = pull_bundle(
            which, directory, TransferOptions(threads=threads, progress=progress), keys=keys or ()
        )
    if result.key is not None:
        signature = f"signed with key {result.key}"
    else:
        signature = "signed, by whom was not checked (--key)" if result.is_signed else "not signed"
    state = "is there already, whole" if result.is_unchanged else "pulled and verified"
    terminal.say(
        f"{shown(directory)}: sha256:{result.digest} {state}; {signature}\n"
        f"read {result.read_bytes:,} bytes; {result.kept_bytes:,} bytes were here"
    )


def list_bundles(context: typer.Context, registry: Registry) -> None:
    """List the names of a registry and the bundles that they stand for; exit with 3 if one is damaged."""
    terminal = terminal_of(context)
    names = list_names(registry)
    if not names:
        terminal.err.print("no bundle has a name here", soft_wrap=True)
    for item in names:
        what = f"sha256:{item.digest}" if item.digest else f"✗ {item.problem}"
        terminal.say(f"{_shown_name(item):<24} {what}")
    damaged = [item for item in names if item.digest is None]
    if damaged:
        raise CheckFailed(
            f"E1704 {len(damaged)} of {len(names)} names are damaged",
            where=parse_reference(registry).shown,
            evidence=f"{_shown_name(damaged[0])}: {damaged[0].problem}",
            remedy="push or promote a bundle under these names again",
        )


def resolve_name(context: typer.Context, which: Which) -> None:
    """Print the digest of the bundle that a name stands for now."""
    terminal_of(context).say(f"sha256:{resolve(which)}")


def promote_bundle(
    context: typer.Context,
    which: Which,
    moved: Annotated[str, typer.Argument(metavar="NAME", help="The name to move.")],
) -> None:
    """Let a name stand for a bundle that is in the registry already; also the way back to an older one."""
    digest = promote(which, moved)
    terminal_of(context).say(f"{moved} is now sha256:{digest}")


def add_registry_verbs(bundle: typer.Typer) -> None:
    """Adds the verbs of this file to `loka-onnx bundle`."""
    bundle.command()(push)
    bundle.command()(pull)
    bundle.command(name="list")(list_bundles)
    bundle.command(name="resolve")(resolve_name)
    bundle.command(name="promote")(promote_bundle)


def _shown_name(item: NamedBundle) -> str:
    """A name; quoted where somebody has put one there that may be none, and could pass for something else."""
    return repr(item.name) if name_problem(item.name) else item.name
