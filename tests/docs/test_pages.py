"""Pages and reference of the documentation: each block runs, or says why not; each name is there."""

import inspect
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_runs import make_columns, make_workplace, write_rows

import loka_onnx
from docs_site import api, command_line
from docs_site.code_blocks import RUNNABLE, YAML, Block, blocks_of, commands_of, prepared_by
from docs_site.command_line import ENVIRONMENT, command_line_page, verbs
from docs_site.expected_output import agree, missing_lines
from docs_site.page_runner import PageFailed, PageRunner
from docs_site.run_file import run_file_page
from docs_site.schemas import schema_files, schemas_page
from loka_onnx.config import run_file_schema
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


def written(path: Path, text: str) -> Path:
    (path / "page.md").write_text(text, encoding="utf-8")
    return path / "page.md"


def block(body: str, language: str = "python", title: str = "") -> Block:
    return Block(Path("page.md"), 3, language, title, body)


def test_blocks_are_found_wherever_markdown_has_them(tmp_path: Path) -> None:
    page = written(
        tmp_path,
        "<!-- before: a finished run -->\n# Page\n\n```python\na = 1\n```\n\n"
        "- a list\n\n  ```bash\n  echo in a list\n  ```\n\n"
        '=== "tab"\n\n    ```yaml title="RUN.yaml"\n    name: x\n    ```\n\n'
        "!!! note\n\n    !!! tip\n\n        ```console\n        $ ls\n        ```\n",
    )
    found = blocks_of(page)
    assert [(each.language, each.title, each.body) for each in found] == [
        ("python", "", "a = 1\n"),
        ("bash", "", "echo in a list\n"),
        ("yaml", "RUN.yaml", "name: x\n"),
        ("console", "", "$ ls\n"),
    ]
    assert all(each.is_run for each in found)
    assert prepared_by(page) == ("a finished run",)
    lines = page.read_text().splitlines()
    assert all(lines[each.line - 1].strip().startswith("```") for each in found)


def test_what_does_not_run_says_so_in_its_title_or_above(tmp_path: Path) -> None:
    page = written(
        tmp_path,
        '```bash title="not run: needs a GPU"\nnvidia-smi\n```\n\n'
        "<!-- not run: needs a cluster -->\n```bash\nkubectl\n```\n\n"
        "<!-- run by tests/integration/test_serve.py -->\n\n```console\n$ curl\n```\n\n"
        "<!-- not run: of the block above only -->\nText in between.\n\n```python\nx\n```\n\n"
        "```text\nclaims nothing\n```\n",
    )
    found = blocks_of(page)
    assert [each.reason_not_to_run for each in found] == ["needs a GPU", "needs a cluster", None, None, None]
    assert [each.test for each in found] == [None, None, "tests/integration/test_serve.py", None, None]
    assert [each.is_run for each in found] == [False, False, False, True, False]


def test_commands_go_on_until_their_quotes_close() -> None:
    shown = "$ curl -d '{\n  \"a\": 1\n}'\nanswer\n\n$ echo a \\\n  b\na b\n$ cat <<END\nx\nEND\n"
    found = commands_of(block(shown, "console"))
    assert [each.text for each in found] == [
        "curl -d '{\n  \"a\": 1\n}'",
        "echo a \\\n  b",
        "cat <<END\nx\nEND",
    ]
    assert [each.printed for each in found] == [("answer", ""), ("a b",), ()]
    with pytest.raises(ValueError, match=r"page\.md:3: 'ls' stands in front of the first command"):
        commands_of(block("ls\n", "console"))
    with pytest.raises(ValueError, match="does not end"):
        commands_of(block("$ echo 'a\n", "console"))


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("done", "done", True),
        ("done", "undone", False),
        ("ΔNE  +0.130 %  within", "ΔNE +0.142 % within", True),
        ("ΔNE +0.130 % within", "ΔNE +0.142 % beyond", False),
        ("ΔNE +0.130 %", "ΔNE +1.30 %", False),
        ("ΔNE -0.004 % ± 0.040 %", "ΔNE +0.010 % ± 0.041 %", True),
        ("ΔNE -0.004 % ± 0.004 %", "ΔNE +0.010 % ± 0.004 %", False),
        ("ΔNE +0.009 %", "ΔNE -0.030 %", False),
        ("ΔNE +0.009 %", "ΔNE +0.010 %", True),
        ("ΔNE +0.009 % [-0.008 %, +0.027 %]", "ΔNE +0.017 % [+0.000 %, +0.034 %]", True),
        ("ΔNE +0.009 % [-0.008 %, +0.027 %]", "ΔNE +0.021 % [+0.004 %, +0.039 %]", False),
        ("[-0.008, +0.027]", "[-0.001, +0.035]", True),
        ("[-0.008, +0.027]", "[-0.031, +0.050]", False),
        ("[0.004 0.17]", "[0.04 0.18]", True),
        ("[+0.00, +0.00]", "[-0.01, +0.01]", True),
        ("[+0.00, +0.00]", "[-0.04, +0.04]", False),
        ("4 of 4 sites", "3 of 4 sites", False),
        ("plan fp8-all", "plan fp16-all", False),
        ("5,396,397 bytes", "5,100,000 bytes", True),
        ("5,396,397 bytes", "2,662,238 bytes", False),
        ("digest … verified", "digest 3fa9 of 7 verified", True),
        ("digest …", "digests 3fa9", False),
        ("a.b (c)", "axb (c)", False),
    ],
)
def test_words_are_exact_and_figures_near(shown: str, printed: str, expected: bool) -> None:
    assert agree(" ".join(shown.split()), printed) is expected


def test_lines_must_come_in_the_order_that_is_shown() -> None:
    assert missing_lines([], "a\n") == []
    assert missing_lines(["a", "…", "c"], "a\nb\nc\n") == []
    assert missing_lines(["c", "a"], "a\nb\nc\n") == ["a"]
    assert missing_lines(["a", "a"], "a\n") == ["a"], "each line stands for one"


def test_an_estimate_is_held_by_the_width_of_the_interval_below_it() -> None:
    shown = ["fp8-safe +0.009 % 1 of 1", "         [-0.008, +0.027]"]
    assert missing_lines(shown, "fp8-safe +0.016 % 1 of 1\n [-0.001, +0.034]\n") == []
    assert missing_lines(shown, "fp8-safe +0.025 % 1 of 1\n [-0.001, +0.034]\n") == shown[:1]
    assert missing_lines(shown[:1], "fp8-safe +0.016 % 1 of 1\n") == shown[:1], "no interval is shown"
    assert missing_lines(shown, "fp8-safe +0.011 % 1 of 1\n [-0.050, +0.060]\n") == shown[1:]


def test_the_blocks_of_a_page_share_files_shell_and_names(tmp_path: Path) -> None:
    with PageRunner(tmp_path) as runner:
        runner.run(block("VALUE = 6\n", title="module.py"))
        runner.run(block("import module\nseven = module.VALUE + 1\n"))
        assert runner.run(block("print(seven)\n")) == "7\n"
        runner.run(block("mkdir below\ncd below\nexport COLOUR=blue\n", "bash"))
        assert "blue\n" in runner.run(block('$ echo $COLOUR; basename "$PWD"\nblue\nbelow\n', "console"))
        runner.run(block("$ false; echo code $?\ncode 1\n", "console"))


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (block("1 / 0\n"), "ZeroDivisionError"),
        (block("raise SystemExit(0)\n"), "SystemExit"),
        (block("true\nfalse\ntrue\n", "bash"), r"page\.md:3: exit code 1"),
        (block("$ echo a\nb\n", "console"), r"`echo a` does not print\nb\n--- it prints\na"),
        (block("$ exit 3\n", "console"), "exit code 3"),
        (block("outptus: []\n", "yaml"), "outptus"),
        (block("batch: {min: 0}\n", "yaml"), r"\$\.batch\.min"),
        (block("x", title="../outside.py"), "lies outside"),
    ],
)
def test_a_block_that_does_not_do_what_it_says_fails(tmp_path: Path, failing: Block, message: str) -> None:
    with PageRunner(tmp_path / "page") as runner:
        (tmp_path / "page").mkdir()
        with pytest.raises(PageFailed, match=message):
            runner.run(failing)


def test_every_public_name_is_on_a_page() -> None:
    named = [name for group in api.GROUPS for name in group.names]
    assert sorted(named) == sorted(loka_onnx.__all__)


def test_every_type_of_a_public_signature_is_on_a_page() -> None:
    """What a public name takes or returns can be looked up."""
    shown = {name.rpartition(".")[2] for group in api.GROUPS for name in (*group.names, *group.types)}
    elsewhere = {
        # Aliases of standard types, and functions that are handed in.
        *("Arrays", "Progress", "StageOutcome", "Run", "Fusions", "Precision", "Corrections", "Mod"),
        # Values that one stage makes and another takes, without use of their own.
        *("Parity", "Split", "Reference", "Outlook"),
    }
    for name in loka_onnx.__all__:
        value = getattr(loka_onnx, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        for parameter in [*inspect.signature(value).parameters.values(), inspect.signature(value)]:
            annotation = getattr(parameter, "annotation", None) or parameter.return_annotation
            for each in re.findall(r"\b[A-Z]\w+", str(annotation)) if isinstance(annotation, str) else []:
                found = getattr(inspect.getmodule(value), each, None)
                if inspect.isclass(found) and found.__module__.startswith("loka_onnx"):
                    assert each in shown | elsewhere, f"{name} has {each}, which no page shows"


def test_pages_name_what_exists() -> None:
    for group in api.GROUPS:
        for name in (*group.names, *group.types):
            module, _, attribute = f"loka_onnx.{name}".rpartition(".")
            assert hasattr(__import__(module, fromlist=[attribute]), attribute), name
    pages = api.api_pages()
    assert "::: loka_onnx.run\n" in pages["reference/api/runs.md"]
    assert "[`load`](serving.md#loka_onnx.load)" in pages["reference/api/index.md"]


def test_every_verb_and_option_is_told() -> None:
    page = command_line_page()
    found = list(verbs())
    assert {"loka-onnx run", "loka-onnx bundle push", "loka-onnx doctor"} <= {verb.name for verb in found}
    for verb in found:
        section = page.partition(f"# {verb.name}\n")[2].partition("\n## ")[0]
        for parameter in verb.command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert option in section, f"{verb.name} {option}"
    assert "| `--port <int>` | Port; 0 for any that is free. (default: 8000; 0<=x<=65535) |" in page
    assert "`<name>`" in page, "a placeholder is not swallowed as HTML"
    assert "loka-onnx bundle sign [OPTIONS] DIR\n" in page


def test_exit_codes_are_those_of_the_errors() -> None:
    codes = command_line_page().partition("## Exit codes")[2]
    assert re.search(r"\| `3` \| .* `CheckFailed`, `DriftFound`, `BundleInvalid`, `BudgetMissed` \|", codes)
    assert re.search(r"\| `2` \| .*`MissingPackage` \|", codes)
    assert "| `130` |" in codes and "| `143` |" in codes


@pytest.mark.slow
def test_every_variable_that_is_read_is_told() -> None:
    """Those that begin with our name, and those of others that we read by a literal name."""
    read = set()
    for path in [*(ROOT / "loka_onnx").rglob("*.py"), *(ROOT / "loka_zoo").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"\bLOKA_ONNX_[A-Z_]+", text))
        read |= set(re.findall(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"", text))
    # What is only looked at to know a terminal or the user's directories.
    assert set(ENVIRONMENT) == read - {"TERM", "XDG_CACHE_HOME", "COLUMNS", "CI"}
    assert all(f"| `{name}` |" in command_line.command_line_page() for name in ENVIRONMENT)


def test_every_key_of_the_run_file_is_told() -> None:
    page = run_file_page()
    schema = run_file_schema()
    for name, held in [("the file", schema), *schema["$defs"].items()]:
        for key in held.get("properties", {}):
            assert re.search(rf"\| \**`{key}`\** \|", page), f"{name}: {key}"
    assert "| **`model`** | [mapping](#model) |  |" in page
    assert "| `budget` | number > 0.0, ≤ 1.0 | `0.0002` |" in page
    assert "| `min` | integer ≥ 1, ≤ 1,048,576 | `1` |" in page
    assert "| **`kind`** | `logit`, `probability`, `regression` |" in page
    anchors = {re.sub(r"[^\w-]", "", title.lower()) for title in re.findall(r"^###? (\S+)$", page, re.M)}
    assert set(re.findall(r"\[mapping\]\(#([^)]+)\)", page)) <= anchors


def test_every_schema_that_is_published_is_listed() -> None:
    page = schemas_page(ROOT / "docs")
    for path in (ROOT / "docs").glob("*-schema.json"):
        assert f"[`{path.name}`](../{path.name})" in page
    assert "loka-onnx/profile/" in page
    assert "reference/run-file-schema.json" in schema_files()


def test_formulas_become_mathml(caplog: pytest.LogCaptureFixture) -> None:
    mathematics = pytest.importorskip("docs_site.mathematics", reason="needs latex2mathml: run `make venv`")
    page = r'<p>a <span class="arithmatex">\(x &lt; \log p\)</span></p>'
    page += r'<div class="arithmatex">\[\Delta = \frac{a}{b} \tag{1}\]</div>'
    found = mathematics.with_mathml(page, "page.md")
    assert found.count("<math") == 2 and "arithmatex" not in found
    assert "&#x0003C;" in found and "<mi>log</mi><mo>&#x2061;</mo>" in found
    assert "<mfrac>" in found and "<span>(1)</span>" in found and 'display="block"' in found
    broken = r'<span class="arithmatex">\(a_b_c\)</span>'
    with caplog.at_level(logging.WARNING):
        assert mathematics.with_mathml(broken, "page.md") == broken
        mathematics.with_mathml(r'<span class="arithmatex">\(\nothing a\)</span>', "other.md")
    assert "page.md: the formula 'a_b_c' cannot be read" in caplog.text
    assert r"other.md: '\nothing' is not known in the formula" in caplog.text
