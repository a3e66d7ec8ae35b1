"""`loka-onnx completion`: verbs, options and values by the Tab key.

The script asks the command itself at each Tab, so that it never says anything else than the command that is
installed. Files are the shell's own business, and so are values that only the user knows.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

# typer has no other name for them, and exports none.
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from loka_onnx.cli.terminal import terminal_of

COMPLETING = "_LOKA_ONNX_COMPLETE"
"""Environment variable by which the script asks."""


class Shell(StrEnum):
    """A shell that completes."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


def enable_completion() -> None:
    """Let the command answer what a completion script asks."""
    completion_init()


def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="The shell that the script is for.", show_default=False)],
) -> None:
    """Print a script that completes verbs, options and values.

    Bash: `source <(loka-onnx completion bash)` in ~/.bashrc. Zsh: the same with zsh in ~/.zshrc, behind
    compinit. Fish: `loka-onnx completion fish > ~/.config/fish/completions/loka-onnx.fish`.
    """
    script = get_completion_script(prog_name="loka-onnx", complete_var=COMPLETING, shell=shell.value)
    terminal_of(context).out.out(script)
