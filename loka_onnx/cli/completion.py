"""`loka-onnx completion`: verbs, options and values by the Tab key.

The script asks the command itself at each Tab, so that it is always that of the installed command.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

# typer has no other name for them, and exports none.
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from loka_onnx.cli.terminal import terminal_of

COMPLETING = "_LOKA_ONNX_COMPLETE"
"""Environment variable by which the script asks."""
enable_completion = completion_init


def completion(
    context: typer.Context,
    shell: Annotated[
        Literal["bash", "zsh", "fish", "powershell"],
        typer.Argument(help="The shell that the script is for.", show_default=False),
    ],
) -> None:
    """Print a script that completes verbs, options and values.

    Bash: `source <(loka-onnx completion bash)` in ~/.bashrc. Zsh: the same with zsh in ~/.zshrc, behind
    compinit. Fish: `loka-onnx completion fish > ~/.config/fish/completions/loka-onnx.fish`.
    """
    script = get_completion_script(prog_name="loka-onnx", complete_var=COMPLETING, shell=shell)
    terminal_of(context).out.out(script)
