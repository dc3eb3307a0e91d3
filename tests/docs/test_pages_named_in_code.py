# SPDX-License-Identifier: Apache-2.0
"""Pages and files of the repository that errors, docstrings and comments name exist. No process."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(
    r"\b(?P<path>(?:docs|examples|benchmarks|tests|csrc)/[\w./*-]+\.(?:md|ipynb|py|cpp|h))"
    r"(?:#(?P<anchor>[\w-]+))?"
)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings}


def wrong_names(text: str) -> list[str]:
    """What a text names that is not there."""
    # A name may go on in the next line of a literal, or of a comment.
    joined = re.sub(r"([/#])\"\s*\n\s*f?\"", r"\1", text)
    wrong = []
    for named in NAMED.finditer(joined):
        files = list(ROOT.glob(named["path"]))
        if not files or (named["anchor"] and named["anchor"] not in anchors_of(files[0])):
            wrong.append(named[0])
    return wrong


def test_what_the_code_names_is_there() -> None:
    files = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "csrc").rglob("*.cpp"),
        *(ROOT / "csrc").rglob("*.h"),
    ]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    assert sum(len(NAMED.findall(text)) for text in texts.values()) > 3
    wrong = {
        str(file.relative_to(ROOT)): names
        for file, text in texts.items()
        if (names := wrong_names(text))
    }
    assert not wrong


def test_a_page_and_an_anchor_that_are_not_there_are_found() -> None:
    assert wrong_names('"see docs/pyg.md"') == ["docs/pyg.md"]
    assert wrong_names("docs/guides/pyg.md#numbers-and-rows") == []
    assert wrong_names("docs/guides/pyg.md#no-such-heading") == [
        "docs/guides/pyg.md#no-such-heading"
    ]
    assert wrong_names('"see docs/"\n    "pyg.md"') == ["docs/pyg.md"]
