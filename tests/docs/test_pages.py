"""Every code block of README and docs that claims to run, run; and none that says nothing about it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_runs import make_columns, make_workplace, write_rows

from docs_site.code_blocks import RUNNABLE, YAML, Block, blocks_of, commands_of, prepared_by
from docs_site.page_runner import PageRunner
from loka_onnx.pipeline.run import run

ROOT = Path(__file__).parents[2]
TESTED_APART = {"README.md": "tests/integration/test_readme.py"}
"""Pages with a test of their own, which looks at what the blocks leave, too."""


class Prepared:
    """Makes what pages ask for, each thing once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def copy(self, name: str, target: Path) -> None:
        """Put one thing into a page's directory."""
        shutil.copytree(self._made(name), target, dirs_exist_ok=True)

    def _made(self, name: str) -> Path:
        place = self.directory / name.replace(" ", "-")
        if not place.is_dir():
            CONTENTS[name](self, place)
        return place

    def _finished_run(self, place: Path) -> None:
        """``ranker.yaml``, its model and rows, the finished run ``runs/ranker``, rows of two later days."""
        work = make_workplace(place)
        # Drift is judged from eight full batches of the profile on.
        work.write_run_file(calibration={"batch_size": 64})
        work.run_file.rename(place / "ranker.yaml")
        run(place / "ranker.yaml")
        for seed, name in enumerate(("today", "day-10"), start=7):
            write_rows(place / f"{name}.parquet", make_columns(seed=seed))

    def _two_finished_runs(self, place: Path) -> None:
        """The run as ``runs/monday`` and ``runs/tuesday``, beside what a finished run has."""
        shutil.copytree(self._made("a finished run"), place)
        for name in ("monday", "tuesday"):
            shutil.copytree(place / "runs" / "ranker", place / "runs" / name)


CONTENTS: dict[str, Callable[[Prepared, Path], None]] = {
    "a finished run": Prepared._finished_run,
    "two finished runs": Prepared._two_finished_runs,
}
"""What a page may ask for in ``<!-- before: … -->``."""


def pages() -> list[Path]:
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(found)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.is_run]


def is_quick(page: Path) -> bool:
    return all(block.language in YAML and not block.file for block in run_blocks(page))


def cases() -> list[object]:
    return [
        pytest.param(page, id=name_of(page), marks=[] if is_quick(page) else [pytest.mark.slow])
        for page in pages()
        if run_blocks(page) and name_of(page) not in TESTED_APART
    ]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("prepared"))


@pytest.mark.parametrize("page", cases())
def test_blocks_do_what_the_page_says(page: Path, tmp_path: Path, prepared: Prepared) -> None:
    for name in prepared_by(page):
        prepared.copy(name, tmp_path)
    with PageRunner(tmp_path) as runner:
        for block in run_blocks(page):
            runner.run(block)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_no_block_is_left_out(page: Path) -> None:
    """A block runs, or says why not, or names the test that runs it."""
    text = "\n".join(block.body for block in blocks_of(page))
    for block in blocks_of(page):
        if block.reason_not_to_run is not None:
            assert len(block.reason_not_to_run.split()) > 1, f"{block.where} does not say why it does not run"
        elif block.test is not None:
            test = ROOT / block.test
            assert test.is_file(), f"{block.where} names {block.test}, which is not there"
            assert page.name in test.read_text(encoding="utf-8"), f"{block.test} does not read {page.name}"
        elif block.file and block.language in RUNNABLE:
            uses = text.count(block.file) + text.count(Path(block.file).stem) - block.body.count(block.file)
            assert uses > 0, f"{block.where}: nothing on the page uses {block.file}"
        elif block.language == "console":
            assert commands_of(block), f"{block.where} has no command"
        else:
            assert block.is_run or block.language not in RUNNABLE
    assert set(prepared_by(page)) <= set(CONTENTS), "nothing of this name is prepared"


def test_pages_with_a_test_of_their_own_are_read_there() -> None:
    for page, test in TESTED_APART.items():
        assert page in (ROOT / test).read_text(encoding="utf-8")
        assert "blocks_of" in (ROOT / test).read_text(encoding="utf-8"), "collected as everywhere else"


def test_a_page_without_a_language_has_no_command_in_it() -> None:
    """A fence without a language claims nothing; one that holds a command of ours should."""
    for page in pages():
        for block in blocks_of(page):
            if not block.language:
                assert not block.body.lstrip("$ ").startswith("loka-onnx "), f"{block.where} needs a language"
