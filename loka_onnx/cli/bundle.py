"""`loka-onnx bundle`: checking, describing, signing, packing, serving and exporting what is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.bundle.format.archive import bundle_name, pack_bundle, verify_path
from loka_onnx.bundle.format.archive import unpack as unpack_bundle
from loka_onnx.bundle.inspection import inspect_bundle
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
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.triton import export_triton as write_repository
from loka_onnx.cli.compare import diff
from loka_onnx.cli.outcome import shown
from loka_onnx.cli.progress import reported
from loka_onnx.cli.terminal import terminal_of
from loka_onnx.engines.triton.models import TritonOptions
from loka_onnx.errors import CheckFailed
from loka_onnx.serving.server import ServeOptions, ServerLimits
from loka_onnx.serving.server import serve as run_server

_DEFAULTS = TransferOptions()
_MIB = 1 << 20
_HELD_BODIES = 4
"""Bodies of the largest size that a server holds at once."""

Bundle = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="The bundle: its directory or its file.", show_default=False)
]
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The bundle as a directory.", show_default=False)
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The bundle as a file.", show_default=False)]
Place = Annotated[
    str, typer.Argument(metavar="URL[#NAME]", help="s3://…, gs://… or a directory; #NAME names it there.")
]
Which = Annotated[str, typer.Argument(metavar="URL#NAME", help="The bundle: URL#NAME or URL#sha256:DIGEST.")]
Registry = Annotated[str, typer.Argument(metavar="URL", help="s3://…, gs://… or a directory.")]
Threads = Annotated[int, typer.Option(help="Parts under way at once; each takes 16 MiB of memory.", min=1)]

bundle = typer.Typer(
    no_args_is_help=True, help="Verify, sign, pack, compare, send or serve a bundle.", rich_markup_mode=None
)


@bundle.command()
def verify(
    context: typer.Context,
    path: Bundle,
    key: Annotated[
        list[Path] | None,
        typer.Option(help="Public key that must have signed it; of several, one.", show_default=False),
    ] = None,
) -> None:
    """Check every file of a bundle, and who signed it; exit with 3 if it does not verify."""
    with reported(terminal_of(context), "verify") as progress:
        verified = verify_path(path, key or (), progress)
    manifest = verified.manifest
    parts = [f"{shown(path)}: verified, {len(manifest.files)} files, {manifest.total_bytes:,} bytes"]
    if verified.signer is not None:
        parts.append(f"signed with key {verified.signer}")
    elif verified.claimed:
        parts.append("signature not checked: name a public key with --key")
    terminal_of(context).say(", ".join(parts))


@bundle.command()
def inspect(context: typer.Context, path: Bundle) -> None:
    """Verify a bundle and describe its engines, inputs, outputs and files."""
    terminal_of(context).out.print(Text(inspect_bundle(path)), soft_wrap=True, end="")


@bundle.command()
def keygen(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys go.", show_default=False)],
    name: Annotated[str, typer.Option(help="Name of the files: NAME.key and NAME.pub.")] = "bundle",
) -> None:
    """Make a key pair for signing bundles (Ed25519).

    The private key is encrypted if the environment variable LOKA_ONNX_KEY_PASSWORD holds a password.
    """
    pair = write_key_pair(directory, name)
    terminal_of(context).say(f"{shown(pair.private)}: the private key; keep it from others")
    terminal_of(context).say(f"{shown(pair.public)}: the public key, {pair.fingerprint}")


@bundle.command()
def sign(
    context: typer.Context,
    directory: Directory,
    key: Annotated[Path, typer.Option(help="Private key (PEM, PKCS8).", show_default=False)],
) -> None:
    """Verify a bundle and sign it; signatures of other keys stay."""
    terminal_of(context).say(f"{shown(directory)}: signed with key {sign_bundle(directory, key)}")


@bundle.command()
def pack(context: typer.Context, directory: Directory, file: File) -> None:
    """Write a bundle as a single file."""
    with reported(terminal_of(context), "pack") as progress:
        written = pack_bundle(directory, file, progress)
    terminal_of(context).say(f"{shown(file)}: packed, {written.stat().st_size:,} bytes")


@bundle.command()
def unpack(context: typer.Context, file: File, directory: Directory) -> None:
    """Check the single file of a bundle and write it as a directory; exit with 3 if it does not verify."""
    with reported(terminal_of(context), "unpack") as progress:
        unpack_bundle(file, directory, progress)
    terminal_of(context).say(f"{shown(directory)}: unpacked and verified")


@bundle.command()
def serve(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle.", show_default=False)],
    host: Annotated[
        str, typer.Option(help="Address to listen on; there is no authentication.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 8000,
    trust: Annotated[bool, typer.Option("--trust", help="Run programs that the bundle holds.")] = False,
    key: Annotated[
        list[Path] | None,
        typer.Option(metavar="PUB", help="Run them if this public key signed the bundle; may be repeated."),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Requests that run at once; 0 for one a core.")] = 0,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that wait or run; more are refused with 503.")
    ] = 256,
    name: Annotated[
        str, typer.Option(help="What the model is called in URLs; as the bundle.", show_default=False)
    ] = "",
    access_log: Annotated[bool, typer.Option("--access-log", help="Log each request.")] = False,
) -> None:
    """Serve a bundle over HTTP in the open inference protocol v2 until Ctrl-C or SIGTERM."""
    terminal, body_bytes = terminal_of(context), max_body_mb * _MIB
    options = ServeOptions(
        host=host,
        port=port,
        trust=trust,
        keys=tuple(key or ()),
        threads=threads,
        limits=ServerLimits(body_bytes, _HELD_BODIES * body_bytes, max_waiting),
        name=name,
        access_log=access_log,
    )
    run_server(
        path, options, lambda url, engine: terminal.say(f"ready: {url} (engine {engine}; Ctrl-C ends it)")
    )


@bundle.command("export-triton")
def export_triton(  # noqa: PLR0913, PLR0917 - typer reads one parameter for each option
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle.", show_default=False)],
    repository: Annotated[
        Path, typer.Argument(metavar="REPOSITORY", help="The repository to write.", show_default=False)
    ],
    name: Annotated[
        str, typer.Option(metavar="N", help="Model that clients call.  [default: name of the bundle]")
    ] = "",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="Engine to serve, several times; the FP32 model always is.  [default: all]"
        ),
    ] = None,
    instances: Annotated[int, typer.Option(metavar="K", help="Instances of each model on a device.")] = 1,
    queue_delay_us: Annotated[
        int, typer.Option(metavar="N", help="Longest wait for a fuller batch, microseconds.")
    ] = 100,
) -> None:
    """Write a model repository of NVIDIA Triton Inference Server."""
    options = TritonOptions(name or bundle_name(path), tuple(engine or ()), instances, queue_delay_us)
    record, say = write_repository(path, repository, options), terminal_of(context).say
    say(("wrote ", "bold"), shown(repository))
    say(f"{record.name}: engine '{record.preferred}'")
    for model in record.models:
        runs = "" if model.runs == (model.name,) else f": {' → '.join(model.runs)}"
        say(f"  {model.name} ({model.backend}){runs}")
        for remark in model.remarks:
            say(f"    {remark}")
    for declined in record.declined:
        say(f"– {declined.engine}: {declined.reason}")
    for remark in record.remarks:
        say(f"! {remark}")


bundle.command()(diff)


@bundle.command()
def push(
    context: typer.Context,
    path: Bundle,
    place: Place,
    again: Annotated[
        bool, typer.Option("--again", help="Send what the registry has as well, to mend it.")
    ] = False,
    threads: Threads = _DEFAULTS.threads,
) -> None:
    """Copy a bundle to a registry; only what is missing there is sent, and the name moves last."""
    terminal = terminal_of(context)
    with reported(terminal, "push") as progress:
        result = push_bundle(path, place, TransferOptions(threads=threads, progress=progress), again=again)
    terminal.say(
        f"{shown(path)}: pushed to {parse_reference(place).shown} as sha256:{result.digest}\n"
        f"sent {result.sent_parts} parts, {result.sent_bytes:,} bytes; "
        f"{result.kept_parts} parts, {result.kept_bytes:,} bytes were there"
    )


@bundle.command()
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


@bundle.command("list")
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


@bundle.command("resolve")
def resolve_name(context: typer.Context, which: Which) -> None:
    """Print the digest of the bundle that a name stands for now."""
    terminal_of(context).say(f"sha256:{resolve(which)}")


@bundle.command("promote")
def promote_bundle(
    context: typer.Context,
    which: Which,
    moved: Annotated[str, typer.Argument(metavar="NAME", help="The name to move.")],
) -> None:
    """Let a name stand for a bundle that is in the registry already; also the way back to an older one."""
    terminal_of(context).say(f"{moved} is now sha256:{promote(which, moved)}")


def _shown_name(item: NamedBundle) -> str:
    """A name; quoted where somebody has put one there that may be none, and could pass for something else."""
    return repr(item.name) if name_problem(item.name) else item.name
