"""Formulas as MathML, so that a page needs no script and no other host to show them."""

from __future__ import annotations

import html
import logging
import re

from latex2mathml.converter import convert

LOG = logging.getLogger("mkdocs.docs_site")
"""MkDocs counts the warnings of loggers below its own; a strict build fails with one."""
FORMULA = re.compile(
    r'<(?P<tag>div|span) class="arithmatex">\\(?P<open>[\[(])(?P<tex>.*?)\\[\])]</(?P=tag)>', re.DOTALL
)
"""What `pymdownx.arithmatex` leaves of a formula in its generic form."""
TAG = re.compile(r"\\tag\{([^}]*)\}")
FUNCTION = re.compile(
    r"<mi>(?:log|ln|exp|max|min|sinh?|cosh?|tanh?|arg)</mi>(?!<mo stretchy=\"false\">&#x00028;)"
)
"""Names of functions, which browsers set apart from an argument only behind the sign of application."""
UNKNOWN = re.compile(r"<m[a-z]+>(\\[A-Za-z]+)")
"""A command that is not translated stands as it is."""


def with_mathml(page: str, address: str) -> str:
    """Replaces each formula by MathML.

    Args:
        page: HTML.
        address: The page, for the warning about a formula that cannot be read.
    """

    def replaced(match: re.Match[str]) -> str:
        tex = html.unescape(match["tex"]).strip()
        is_block = match["open"] == "["
        number = TAG.search(tex)
        try:
            formula = convert(TAG.sub("", tex), display="block" if is_block else "inline")
        except Exception as error:
            LOG.warning("%s: the formula '%s' cannot be read: %r", address, tex, error)
            return match[0]
        if unknown := UNKNOWN.search(formula):
            LOG.warning("%s: '%s' is not known in the formula '%s'", address, unknown[1], tex)
        formula = FUNCTION.sub(r"\g<0><mo>&#x2061;</mo>", formula)
        if not is_block:
            return formula
        tag = f"<span>({html.escape(number[1])})</span>" if number else ""
        # A wide formula scrolls by itself, not the page.
        return f'<div class="formula" tabindex="0" role="group">{formula}{tag}</div>'

    return FORMULA.sub(replaced, page)
