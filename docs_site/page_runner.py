"""Runs the blocks of a page in the order of the page, in one directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from docs_site.code_blocks import PYTHON, SHELLS, YAML, Block, commands_of
from docs_site.expected_output import missing_lines

CHILD = Path(__file__).with_name("python_page.py")
SECONDS = 300
"""A page whose command takes longer has failed."""


class PageFailed(AssertionError):
    """A block does not do what its page says."""


class PageRunner:
    """The state that the blocks of a page share.

    Args:
        directory: Where they run.
        environment: Environment variables; those of this process where None.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        given = dict(os.environ if environment is None else environment)
        # The commands of this environment come first; colours and width are those of a pipe.
        given["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{given.get('PATH', '')}"
        for name in ("FORCE_COLOR", "COLUMNS", "LINES"):
            given.pop(name, None)
        self._environment = given
        self._state = directory / ".page-shell"
        self._python: subprocess.Popen[str] | None = None

    def __enter__(self) -> PageRunner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            self._python.kill()
            self._python.communicate()

    def run(self, block: Block) -> str:
        """Run, write or check one block.

        Returns:
            What it printed.

        Raises:
            PageFailed: It fails, or does not print what the page shows.
        """
        if block.file:
            path = self.directory / block.file
            if not path.resolve().is_relative_to(self.directory.resolve()):
                raise PageFailed(f"{block.where}: '{block.file}' lies outside of the page's directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
            return ""
        if block.language in PYTHON:
            return self._run_python(block)
        if block.language in SHELLS:
            return self._run_shell(block, block.body, "-e")
        if block.language in YAML:
            check_fragment(block)
            return ""
        return "".join(self._run_command(block, index) for index in range(len(commands_of(block))))

    def _run_command(self, block: Block, index: int) -> str:
        command = commands_of(block)[index]
        printed = self._run_shell(block, command.text)
        missing = missing_lines(command.printed, printed)
        if missing:
            shown = "\n".join(missing)
            raise PageFailed(
                f"{block.where}: `{command.text}` does not print\n{shown}\n--- it prints\n{printed}"
            )
        return printed

    def _run_shell(self, block: Block, text: str, *options: str) -> str:
        # Without options the exit code of a line's last command counts, as at a prompt.
        # What a command exports and where it goes holds for those that follow, as in one session.
        before = f'[ ! -f "{self._state}" ] || . "{self._state}"\n'
        after = (
            f'\npage_code=$?; {{ export -p; printf "cd %q\\n" "$PWD"; }} > "{self._state}"; exit $page_code\n'
        )
        done = subprocess.run(
            ["bash", *options, "-o", "pipefail", "-c", before + text + after],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        if done.returncode:
            raise PageFailed(f"{block.where}: exit code {done.returncode} of\n{text}\n---\n{done.stdout}")
        return done.stdout

    def _run_python(self, block: Block) -> str:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, os.fspath(CHILD)],
                cwd=self.directory,
                env=self._environment | {"PYTHONPATH": os.fspath(self.directory)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin is not None and self._python.stdout is not None
        # Lines in front keep the numbers of a traceback those of the page.
        request = {"code": "\n" * block.line + block.body, "name": os.fspath(block.page)}
        self._python.stdin.write(json.dumps(request) + "\n")
        self._python.stdin.flush()
        line = self._python.stdout.readline()
        if not line:
            raise PageFailed(f"{block.where}: the interpreter of this page ended")
        answer: dict[str, str] = json.loads(line)
        if answer["error"]:
            raise PageFailed(f"{block.where}: {answer['error']}\n---\n{answer['printed']}")
        return answer["printed"]


def check_fragment(block: Block) -> None:
    """Checks the keys and values of a part of a run file against its schema.

    Raises:
        PageFailed: The schema refuses them.
    """
    import jsonschema
    import yaml

    from loka_onnx.config import run_file_schema

    value = yaml.safe_load(block.body)
    schema = {**run_file_schema(), "required": []}
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as error:
        raise PageFailed(f"{block.where}: {error.json_path}: {error.message}") from error
