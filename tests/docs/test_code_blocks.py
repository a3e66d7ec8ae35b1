"""The collector of code blocks, the runner of pages, and the comparison of what a page shows."""

from pathlib import Path

import pytest

from docs_site.code_blocks import Block, blocks_of, commands_of, prepared_by
from docs_site.expected_output import agree, missing_lines
from docs_site.page_runner import PageFailed, PageRunner


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
