"""Code blocks of Markdown pages, and what each claims.

A block of a language in `RUNNABLE` claims to run as it stands: Python in one namespace for the page, shell
commands in one directory, in the order of the page. A ``title`` that is a file name makes a block of any
language that file; something on the page must use it. YAML without a title is a part of a run file, which is
checked. A block that claims nothing is of another language, ``text`` for example.

Whatever does not run says why, to readers by its title, ``bash title="not run: needs a GPU"``, or, where
readers know, in a comment above the block::

    <!-- not run: needs a GPU -->
    <!-- run by tests/integration/test_serve.py -->

The second names the test that runs it; that file must name the page. In a block of ``console``, the lines
behind ``$`` are commands, and the other ones what they print (`docs_site.expected_output`).

A comment anywhere on a page prepares what it needs (`tests/docs/prepared.py`)::

    <!-- before: a finished run -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

SHELLS = frozenset({"bash", "sh", "shell"})
PYTHON = frozenset({"python", "py"})
YAML = frozenset({"yaml", "yml"})
RUNNABLE = SHELLS | PYTHON | YAML | {"console"}
NOT_RUN = re.compile(r"not run:\s*(?P<reason>.*)", re.DOTALL)
RUN_BY = re.compile(r"run by\s+(?P<test>tests/\S+\.py)")
BEFORE = re.compile(r"<!--\s*before:\s*(?P<names>.*?)\s*-->", re.DOTALL)
COMMENT = re.compile(r"<!--\s*(?P<text>.*?)\s*-->\s*$", re.DOTALL)
TITLE = re.compile(r"""\b(?:title|file)=(?:"(?P<quoted>[^"]*)"|(?P<plain>\S+))""")
FILE_NAME = re.compile(r"[\w./-]+\.\w+|[\w/-]*Makefile")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The file that it stands in.
        line: Of its fence, from 1.
        language: First word of the info string, in lower case; empty without one.
        title: As given in the info string; empty without one.
        body: Its text.
        comment: Text of the HTML comment right above it; empty without one.
    """

    page: Path
    line: int
    language: str
    title: str
    body: str
    comment: str = ""

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that it is; empty where its title names none."""
        return self.title if FILE_NAME.fullmatch(self.title) else ""

    @property
    def reason_not_to_run(self) -> str | None:
        """Why it does not run; None where it does not say that it does not run."""
        for text in (self.title, self.comment):
            if match := NOT_RUN.match(text):
                return match["reason"].strip()
        return None

    @property
    def test(self) -> str | None:
        """The test that runs it in place of the page's; None where there is none."""
        match = RUN_BY.search(self.comment)
        return match["test"] if match else None

    @property
    def is_run(self) -> bool:
        """Whether the page's test runs, writes or checks it."""
        if self.reason_not_to_run is not None or self.test is not None:
            return False
        return bool(self.file) or self.language in RUNNABLE


@dataclass(frozen=True)
class Command:
    """A shell command of a console block and the lines that it is said to print."""

    text: str
    printed: tuple[str, ...]


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, also those in lists, admonitions and tabs."""
    return list(_blocks(page.read_text(encoding="utf-8"), page, 0, ""))


def prepared_by(page: Path) -> tuple[str, ...]:
    """Names of what must be there before the page is run."""
    found = BEFORE.findall(page.read_text(encoding="utf-8"))
    return tuple(name.strip() for names in found for name in names.split(","))


def _blocks(text: str, page: Path, first_line: int, comment: str) -> Iterator[Block]:
    for token in MarkdownIt("commonmark").parse(text):
        line = first_line + (token.map[0] if token.map else 0)
        if token.type == "html_block":
            match = COMMENT.search(token.content)
            comment = match["text"] if match else ""
            continue
        if token.type == "fence":
            yield _block(token.info, token.content, page, line + 1, comment)
        elif token.type == "code_block" and "```" in token.content:
            # What stands in an admonition or a tab is indented, which Markdown alone takes for code.
            yield from _blocks(token.content, page, line, comment)
        if token.type not in ("paragraph_close", "list_item_close"):
            comment = ""


def _block(info: str, body: str, page: Path, line: int, comment: str) -> Block:
    language = re.split(r"[\s{]", info.strip(), maxsplit=1)[0].lower()
    title = TITLE.search(info)
    return Block(
        page, line, language, (title["quoted"] or title["plain"] or "") if title else "", body, comment
    )


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block; one goes on over lines until its quotes are closed.

    Raises:
        ValueError: Text in front of the first command, or a command that does not end.
    """
    commands: list[Command] = []
    lines = block.body.splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith("$ "):
            text = line[2:]
            while _goes_on(text):
                if not lines:
                    raise ValueError(f"{block.where}: the command '{text}' does not end")
                text += "\n" + lines.pop(0).removeprefix("> ")
            commands.append(Command(text, ()))
        elif commands:
            commands[-1] = Command(commands[-1].text, (*commands[-1].printed, line))
        elif line.strip():
            raise ValueError(
                f"{block.where}: '{line}' stands in front of the first command; begin it with '$ '"
            )
    return commands


def _goes_on(command: str) -> bool:
    if command.endswith("\\"):
        return True
    without_escapes = re.sub(r"\\.", "", command)
    outside = re.sub(r"'[^']*'|\"[^\"]*\"", "", without_escapes)
    heredoc = re.search(r"<<-?\s*['\"]?(\w+)", outside)
    if heredoc and not re.search(rf"^\s*{heredoc[1]}\s*$", command, re.MULTILINE):
        return True
    return "'" in outside or '"' in outside
