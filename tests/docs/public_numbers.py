"""Every number of README and docs: bound to a record by a formula, or of a kind that measures nothing.

A number that none of this accounts for fails its page's test. Nothing here imports the package: formulas are
written a second time, over plain JSON. What code blocks hold is run by the page's own test, and is not looked
at here; the demo's table is, because nothing reruns it. `python tests/docs/public_numbers.py` lists every
number with what it is bound to, in `numbers.yaml`.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import yaml
from number_formulas import value_of

ROOT = Path(__file__).parents[2]
BINDINGS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("numbers.yaml").read_text(encoding="utf-8")
)
WITH_STATUS, STATUS = {"docs/serving.md"}, r"\b(?:400|40[458]|41[135]|50[03])\b"
"""Pages with statuses of HTTP, and how these are written."""
THAT_RUN = {"docs/tutorial/index.md"}
"""Pages whose numbers may be those that their own blocks print: a test runs the blocks and holds them."""
PRINTED = r"[+\-−]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"(?<![\w.,#\-])(?<!\w/){PRINTED}(?!\w)")
PRINTED_HERE = "printed by a block of this page, which its test runs"
HARMLESS = {
    "code": r"`[^`]*`",
    "mathematics": r"\$\$.*?\$\$|\$[^$]+\$",
    "reference": r"arXiv \d+\.\d+|RFC \d+(?:, section \d+)?|ACM TiiS 5\(4\), 2015|draft \d+-\d+"
    r"|License \d\.\d",
    "version": r"(?:Python|[Oo]pset|TensorRT(?: for RTX)?|MIGraphX|PyTorch|[Bb]undle format|versions?|CUDA) "
    r"\d[\d.]*(?:(?:, | and | or )\d[\d.]*)*|\b\d+\.\d+\.\d+(?:\.\d+)?",
    "name": r"MovieLens \d+[MK]",
    "heading": r"^#+ \d+\. ",
    "list": r"^ *\d+\. ",
    "exit code": r"[Ee]xits? (?:codes?:? |with )\d(?: or \d)?|ends? with \d\b|code is \d|makes it \d",
    "confidence": r"\b9[57](?:\.5)? %",
    "batch size": r"[Bb]atch(?:es)?(?: sizes?)?(?: of)? \d+(?: and \d+)?",
}
"""Kinds of text whose numbers measure nothing, and how each is written."""


@dataclass(frozen=True)
class Found:
    """A number of a page."""

    page: str
    line: int
    text: str
    bound: str


class Mismatch(AssertionError):
    """A number is not what it is bound to."""


def pages() -> list[Path]:
    """README and every page that is written by hand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    """A page without code blocks, comments and targets of links, each character in its place."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^ *\2 *$", blank, text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.S)
    return re.sub(r"(?<=\])\([^)]*\)", blank, text)


def numbers_of(page: Path, root: Path = ROOT) -> list[Found]:
    """Every number of a page."""
    name, text = page.relative_to(root).as_posix(), prose(page.read_text(encoding="utf-8"))
    known = BINDINGS.get(name, {})
    bound = _measured(text, known, name)
    for kind, snippets in known.get("stated", {}).items():
        for snippet in snippets:
            match = re.search(_spaced(snippet), text)
            if match is None:
                raise Mismatch(f"{name} has no '{snippet}'")
            for number in NUMBER.finditer(text, match.start(), match.end()):
                bound.setdefault(number.start(), kind)
    kinds = HARMLESS | ({"HTTP status": STATUS} if name in WITH_STATUS else {})
    for kind, pattern in kinds.items():
        for match in re.finditer(pattern, text, re.M | re.S if kind == "mathematics" else re.M):
            for number in re.finditer(r"[+\-−]?\.?\d", match[0]):
                bound.setdefault(match.start() + number.start(), kind)
    printed = set(re.findall(PRINTED, "".join(_blocks(page)))) if name in THAT_RUN else set()
    for match in NUMBER.finditer(text):
        if match[0] in printed or f"+{match[0]}" in printed:
            bound.setdefault(match.start(), PRINTED_HERE)
    return [
        Found(name, text.count("\n", 0, each.start()) + 1, each[0], bound.get(each.start(), ""))
        for each in NUMBER.finditer(text)
    ]


def _measured(text: str, known: dict[str, Any], name: str) -> dict[int, str]:
    """Place of each number that a formula is bound to → the formula."""
    bound: dict[int, str] = {}
    for entry in known.get("measured", ()):
        match = _only(text, entry["text"], name)
        shown = {match.start(group): match[group] for group in range(1, match.re.groups + 1)}
        if len(shown) != len(entry["of"]):
            raise Mismatch(f"{name}: {len(shown)} numbers and {len(entry['of'])} formulas: {entry['text']}")
        for start, formula in zip(shown, map(str, entry["of"]), strict=True):
            _hold(shown[start], formula, f"{name}: '{entry['text']}'")
            bound[start] = formula
        for number in NUMBER.finditer(text, match.start(), match.end()):
            bound.setdefault(number.start(), "names the case")
    return bound


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)


def _spaced(text: str) -> str:
    return r"\s+".join(map(re.escape, text.split()))


def _only(text: str, template: str, name: str) -> re.Match[str]:
    """Where a template stands, which must be one place."""
    found = list(re.finditer(_spaced(template).replace(re.escape("{}"), f"({PRINTED})"), text))
    if len(found) != 1:
        raise Mismatch(f"{name}: found {len(found)} times: {template}")
    return found[0]


def _hold(shown: str, formula: str, where: str) -> None:
    exact, digits = value_of(formula), shown.replace(",", "").replace("−", "-")
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
    if abs(float(digits) - exact) > half * (1 + 1e-6):
        raise Mismatch(f"{where}: printed {shown}, {formula} is {exact:.6g}")


def every_number() -> Iterator[Found]:
    """Of every page."""
    for page in pages():
        yield from numbers_of(page)


def main() -> None:
    """List them."""
    entries = [entry for known in BINDINGS.values() for entry in known.get("measured", ())]
    formulas, counts = {str(formula) for entry in entries for formula in entry["of"]}, Counter[str]()
    for each in every_number():
        is_formula = each.bound in formulas
        counts["recomputed" if is_formula else each.bound or "UNBOUND"] += 1
        print(
            f"{each.page}:{each.line}: {each.text}  {'=' if is_formula else 'is'}  {each.bound or 'UNBOUND'}"
        )
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
