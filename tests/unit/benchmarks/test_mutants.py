"""A test that fails on the library as it is has caught no mutant, and hides none that others catch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.micro import mutants

FILE = "loka_onnx/errors.py"
FALSE, TRUE = "tests/unit/a.py::test_that[one case]", "tests/unit/b.py::test_this"


class Suite:
    """Stands for pytest: the first of these that is not left out fails."""

    def __init__(self, *failing: tuple[str, bool]) -> None:
        self.failing, self.runs = failing, 0

    def __call__(self, tree: Path, *arguments: str) -> tuple[int, str]:
        self.runs += 1
        is_mutated = (tree / FILE).read_bytes() != (mutants.ROOT / FILE).read_bytes()
        left_out = {argument.removeprefix("--deselect=") for argument in arguments}
        if not is_mutated:
            return int(any(name in arguments and not needs for name, needs in self.failing)), ""
        for name, _ in self.failing:
            if name not in left_out:
                return 1, f"...\nFAILED {name} - AssertionError: no - not so\n"
        return 0, ""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / FILE).parent.mkdir()
    shutil.copyfile(mutants.ROOT / FILE, tmp_path / FILE)
    return tmp_path


@pytest.mark.parametrize(
    ("failing", "caught"),
    [
        ([], ""),
        ([(FALSE, False)], ""),
        ([(TRUE, True)], TRUE),
        ([(FALSE, False), (TRUE, True)], TRUE),
        ([(f"tests/unit/{n}.py::test", False) for n in range(mutants.FALSE_ALARMS)], None),
    ],
)
def test_what_fails_without_a_mutant_catches_none(
    failing: list[tuple[str, bool]], caught: str | None, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "_pytest", Suite(*failing))
    mutant = next(mutants.mutants_of(mutants.ROOT / FILE))
    outcome = mutants.judged(mutant, 0, tree)
    assert (outcome and outcome.caught_by) == caught
    assert (tree / FILE).read_bytes() == (mutants.ROOT / FILE).read_bytes()
