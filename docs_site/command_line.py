"""The page of the command line: every verb with its options, exit codes, environment variables."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typer.main import get_command

from docs_site.markdown import cell, code, table
from loka_onnx import errors
from loka_onnx.cli.main import ANYWHERE, app

PROGRAM = "loka-onnx"
PLACEHOLDER = re.compile(r"(?<![`\w])(<[\w .]+>|--[a-z][a-z-]*|[a-z_]+(?:\.[a-z_]+)+=\S+?)(?=[\s;,.)]|$)")

ENVIRONMENT = {
    "CC": "C compiler of the backend `inductor` where `/usr/bin/gcc` is missing; counts together with `CXX`.",
    "CXX": "C++ compiler of the backend `inductor` where `/usr/bin/g++` is missing.",
    "FORCE_COLOR": "Any value that is not empty colours what goes through a pipe.",
    "LOKA_ONNX_CACHE": "Directory of built engines and of what else is kept between runs. By default "
    "`loka-onnx` "
    "below `XDG_CACHE_HOME`, or below `~/.cache`.",
    "LOKA_ONNX_DATA": "Directory that holds the data sets that benchmarks and some tests read.",
    "LOKA_ONNX_KEY_PASSWORD": "Password of private keys: `bundle keygen` encrypts with it, signing decrypts.",
    "LOKA_ONNX_LOG": "What `--log` is without being given: `text`, or `json` for one JSON object a line.",
    "LOKA_ONNX_STRICT_MODS": "Any value that is not empty lets the error of a mod end a run. By default the "
    "run goes on without the mod, and the report says so.",
    "NO_COLOR": "Any value that is not empty switches colours and styles off, also beside `FORCE_COLOR`.",
}
"""Variables that a user may set; a test holds them against the sources."""

MEANINGS = {
    0: "Done.",
    1: "A stage failed, or a bug; a bug prints its traceback and asks to be reported.",
    2: "The configuration or an input is wrong: one message with what, where, evidence and remedy.",
    3: "The check that was asked for did not hold.",
    130: "Interrupted by Ctrl-C; `run --resume` and every stage verb go on from the last finished stage.",
    128 + signal.SIGTERM: "Ended by SIGTERM; likewise.",
}


@dataclass(frozen=True)
class Verb:
    """A command and how it is called.

    Attributes:
        name: With the program and the groups that it is in.
        command: As typer made it.
    """

    name: str
    command: Any

    @property
    def is_group(self) -> bool:
        """Whether it only holds further verbs."""
        return bool(getattr(self.command, "commands", {}))


def verbs() -> Iterator[Verb]:
    """Every verb in the order of the help text, groups before what they hold."""

    def walk(name: str, command: Any) -> Iterator[Verb]:
        for below, held in command.commands.items():
            if getattr(held, "hidden", False):
                continue
            verb = Verb(f"{name} {below}", held)
            yield verb
            if verb.is_group:
                yield from walk(verb.name, held)

    yield from walk(PROGRAM, get_command(app))


def command_line_page() -> str:
    """The page, as Markdown."""
    every = list(verbs())
    parts = [
        "# Command line",
        f"{code(PROGRAM)} prints results to standard output, progress and messages to standard error. "
        f"{' and '.join(code(flag) for flag in ANYWHERE)} may stand before or behind the verb.",
        "## Verbs",
        table(
            ("Verb", "What it does"),
            [(f"[{code(verb.name)}](#{_anchor(verb)})", _first_sentence(verb)) for verb in every],
        ),
        "## Options of every verb",
        _parameters(get_command(app), PROGRAM),
    ]
    for verb in every:
        parts += [f"{'###' if verb.name.count(' ') > 1 else '##'} {verb.name}", _help(verb.command)]
        if not verb.is_group:
            parts += [f"```text\n{_usage(verb)}\n```", _parameters(verb.command, verb.name)]
    parts += ["## Exit codes", table(("Code", "Meaning", "Errors"), _exit_codes())]
    parts += ["## Environment variables", table(("Variable", "Meaning"), _variables())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _anchor(verb: Verb) -> str:
    return verb.name.replace(" ", "-")


def _help(command: Any) -> str:
    """The help text; what Markdown would swallow stands as code."""
    text = (command.help or "").replace("\b", "").replace("\f", "").strip()
    return "\n\n".join(" ".join(part.split()) for part in _as_code(text).split("\n\n"))


def _as_code(text: str) -> str:
    return PLACEHOLDER.sub(lambda match: code(match[0]), text)


def _first_sentence(verb: Verb) -> str:
    return re.split(r"(?<=\.)\s", _help(verb.command), maxsplit=1)[0]


def _context(command: Any, name: str) -> Any:
    return command.context_class(command, info_name=name)


def _usage(verb: Verb) -> str:
    pieces = verb.command.collect_usage_pieces(_context(verb.command, verb.name))
    # Braces around a required argument belong to choices elsewhere.
    return " ".join([verb.name, *(re.sub(r"^\{(.*)\}$", r"\1", piece) for piece in pieces)])


def _parameters(command: Any, name: str) -> str:
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(_context(command, name))
        if record is None or "--help" in parameter.opts:
            continue
        usage, meaning = record
        rows.append(
            (
                code(usage.replace("<int range>", "<int>").replace("<float range>", "<float>")),
                cell(_as_code(_without_brackets(meaning))),
            )
        )
    return table(("Argument or option", "Meaning"), rows) if rows else ""


def _without_brackets(text: str) -> str:
    """``[required]`` and ``[default: 6]`` as words, which Markdown does not take for links."""
    text = re.sub(r"\s*\[required\]", " **Required.**", text)
    return re.sub(r"\s*\[([^\]]*)\]$", lambda match: f" ({match[1]})", text)


def _exit_codes() -> list[tuple[str, str, str]]:
    classes = [errors.LokaError, *_below(errors.LokaError)]
    rows = []
    for number, meaning in MEANINGS.items():
        names = ", ".join(code(kind.__name__) for kind in classes if kind.exit_code == number)
        rows.append((code(str(number)), meaning, names))
    return rows


def _below(kind: type[errors.LokaError]) -> Iterator[type[errors.LokaError]]:
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield each
            yield from _below(each)


def _variables() -> list[tuple[str, str]]:
    return [(code(name), meaning) for name, meaning in ENVIRONMENT.items()]
