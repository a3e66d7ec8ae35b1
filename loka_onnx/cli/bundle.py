"""`loka-onnx bundle`: checking, describing, signing and packing what is deployed.

Its other verbs have files of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from loka_onnx.bundle.format.archive import pack_bundle, verify_path
from loka_onnx.bundle.format.archive import unpack as unpack_bundle
from loka_onnx.bundle.inspection import inspect_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.cli.bundle_registry import add_registry_verbs
from loka_onnx.cli.bundle_serve import serve
from loka_onnx.cli.bundle_triton import export_triton_command
from loka_onnx.cli.compare import diff
from loka_onnx.cli.outcome import shown
from loka_onnx.cli.progress import reported
from loka_onnx.cli.terminal import terminal_of

Bundle = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="The bundle: its directory or its file.", show_default=False)
]
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The bundle as a directory.", show_default=False)
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The bundle as a file.", show_default=False)]

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
    _say(context, ", ".join(parts))


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
    _say(context, f"{shown(pair.private)}: the private key; keep it from others")
    _say(context, f"{shown(pair.public)}: the public key, {pair.fingerprint}")


@bundle.command()
def sign(
    context: typer.Context,
    directory: Directory,
    key: Annotated[Path, typer.Option(help="Private key (PEM, PKCS8).", show_default=False)],
) -> None:
    """Verify a bundle and sign it; signatures of other keys stay."""
    _say(context, f"{shown(directory)}: signed with key {sign_bundle(directory, key)}")


@bundle.command()
def pack(context: typer.Context, directory: Directory, file: File) -> None:
    """Write a bundle as a single file."""
    with reported(terminal_of(context), "pack") as progress:
        written = pack_bundle(directory, file, progress)
    _say(context, f"{shown(file)}: packed, {written.stat().st_size:,} bytes")


@bundle.command()
def unpack(context: typer.Context, file: File, directory: Directory) -> None:
    """Check the single file of a bundle and write it as a directory; exit with 3 if it does not verify."""
    with reported(terminal_of(context), "unpack") as progress:
        unpack_bundle(file, directory, progress)
    _say(context, f"{shown(directory)}: unpacked and verified")


bundle.command()(diff)
add_registry_verbs(bundle)
bundle.command()(serve)
bundle.command("export-triton")(export_triton_command)


def _say(context: typer.Context, text: str) -> None:
    terminal_of(context).out.print(Text(text), soft_wrap=True)
