# SPDX-License-Identifier: Apache-2.0
"""The pages about performance: the files of ``benchmarks/results``, a list of them, and bars.

Nothing is typed here: a bar is a cell of a table of the newest file of a kind.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NAME = re.compile(r"(?P<kind>\w+?)_(?:cpu_|gpu_|[a-z]{1,3}\d{2,4}_)?(?P<date>\d{4}-\d\d-\d\d)")

# Shelves: their title, what the names of their files begin with, and what they hold.
SHELVES = {
    "Speed and memory": ("", "Against DGL, PyG, DistDGL and others, in turn on the same machine."),
    "Accuracy": ("accuracy link_prediction", "What models reach, against what was published."),
    "Before and after": ("two_trees defaults", "A change of the code, or of a default, measured."),
    "Installation": (
        "install",
        "Which Pythons and torches, which way to install, and does it work.",
    ),
    "Campaigns": ("campaign", "Damage, kills, hostile input and long runs: what came of it."),
}


@dataclass(frozen=True)
class Chart:
    """Which table becomes bars.

    Args:
        kind: The name of the file without hardware and date; the newest is taken.
        heading: The heading of its section, or "" for the first table.
        column: The column whose numbers are drawn.
        title: Above the bars.
    """

    kind: str
    heading: str
    column: str
    title: str


CHARTS = [
    Chart("full_batch", "sage", "s per epoch", "GraphSAGE, full batch: seconds for an epoch"),
    Chart("full_batch", "gat", "s per epoch", "GAT, full batch: seconds for an epoch"),
    Chart("full_batch", "gat", "peak MB of a process", "GAT, full batch: peak MB of a process"),
]


def first_heading(text: str) -> str:
    """A file's title."""
    found = re.search(r"^# (.+)$", text, re.M)
    assert found, "a result begins with a title"
    return found[1]


def newest_by_kind() -> dict[str, list[Path]]:
    """Files by kind, the newest first."""
    kinds: dict[str, list[Path]] = {}
    for file in sorted(RESULTS.glob("*.md")):
        found = NAME.fullmatch(file.stem)
        assert found, f"{file.name} is not what_hardware_date.md"
        kinds.setdefault(found["kind"], []).append(file)
    return {
        kind: sorted(files, key=lambda f: f.stem[-10:], reverse=True)
        for kind, files in kinds.items()
    }


def table_of(text: str, heading: str) -> tuple[list[str], list[list[str]]]:
    """The first table behind a heading: its columns, and its rows."""
    if heading:
        text = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.M)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert lines, f"no table behind {heading!r}"
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in lines[0].splitlines()]
    return cells[0], cells[2:]


def bars(chart: Chart, file: Path) -> str:
    """A table as bars, in the colours of the page."""
    columns, rows = table_of(file.read_text(encoding="utf-8"), chart.heading)
    column = columns.index(chart.column)
    values = [(row[0], row[column].split()[0]) for row in rows]
    most = max(float(value.replace(",", "")) for _, value in values)
    lines = [
        f'<figure class="bars"><figcaption>{html.escape(chart.title)}'
        f' (<a href="{file.stem}.html">{file.stem[-10:]}</a>)</figcaption>'
    ]
    for label, value in values:
        kind = "bar ours" if label.startswith("graphshard") else "bar"
        width = 100 * float(value.replace(",", "")) / most
        lines.append(
            f'<div class="{kind}"><span class="label">{html.escape(label)}</span>'
            f'<span class="track"><i style="width: {width:.1f}%"></i>'
            f'<span class="value">{value}</span></span></div>'
        )
    return "\n".join([*lines, "</figure>"])


def titles(pages: dict[str, str], kinds: dict[str, list[Path]]) -> dict[str, str]:
    """What the list calls each kind: the title of its newest file, without the date beside it."""
    heads = {
        kind: re.sub(r",( CPU,)? \d{4}-\d\d-\d\d$", "", first_heading(pages[files[0].name]))
        for kind, files in kinds.items()
    }
    several = [head for head, count in Counter(heads.values()).items() if count > 1]
    return {kind: f"{head} (`{kind}`)" if head in several else head for kind, head in heads.items()}


def performance_pages() -> dict[str, str]:
    """The text of each page by its name within ``performance/``."""
    kinds = newest_by_kind()
    pages = {
        file.name: file.read_text(encoding="utf-8") for files in kinds.values() for file in files
    }
    parts = [
        "# Performance",
        "Each result is a file of the repository with the command, the versions and the machine"
        " that gave it; this page is made from these files. What is measured is the CPU unless a"
        " name says otherwise.",
    ]
    parts += [bars(chart, kinds[chart.kind][0]) for chart in CHARTS]
    heads = titles(pages, kinds)
    trees: dict[str, list[str]] = {}
    taken: set[str] = set()
    named = [start for starts, _ in SHELVES.values() for start in starts.split()]
    for title, (starts, what) in SHELVES.items():
        own = starts.split()
        parts.append(f"## {title}\n\n{what}")
        rows = ["| what | newest | before |", "| --- | --- | --- |"]
        for kind, files in kinds.items():
            is_here = kind.startswith(tuple(own)) if own else not kind.startswith(tuple(named))
            if not is_here or kind in taken:
                continue
            taken.add(kind)
            head = heads[kind].replace("|", r"\|")
            links = [f"[{file.stem[-10:]}]({file.name})" for file in files]
            for file in files:
                date = f", {file.stem[-10:]}" if len(files) > 1 else ""
                entry = f"{heads[kind].replace('`', '')}{date} <{file.stem}>"
                trees.setdefault(title, []).append(entry)
            rows.append(f"| {head} | {links[0]} | {', '.join(links[1:])} |")
        parts.append("\n".join(rows))
    for title, entries in trees.items():
        tree = "\n".join(entries)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{tree}\n```")
    pages["index.md"] = "\n\n".join(parts) + "\n"
    return pages
