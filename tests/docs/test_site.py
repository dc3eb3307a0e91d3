# SPDX-License-Identifier: Apache-2.0
"""The site: what is staged for Sphinx, the API that it lists, links; with --all, the whole build.

No process but the build, which is one.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphshard
import graphshard.partition

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "docs" / "site"


def site_module(name: str) -> ModuleType:
    """A module of docs/site, or docs, which are on no path but while it is imported."""
    pytest.importorskip("nbclient", reason="notebooks are run by nbclient, which is not installed")
    sys.path[:0] = [str(HERE), str(ROOT / "docs")]
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[:2]


@pytest.fixture(scope="module")
def api() -> Any:
    return site_module("api_pages")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The builder, which stages into a folder of the test."""
    monkeypatch.syspath_prepend(str(HERE))
    build = site_module("build_site")
    assert Path(build.__file__).parent == HERE
    monkeypatch.setattr(build, "STAGE", tmp_path / "source")
    return build


def described(api: Any) -> dict[str, Any]:
    """Each function and class with an entry, by the name of its entry."""
    return {
        f"{door}.{name}": getattr(importlib.import_module(door), name)
        for door, name in api.homes().values()
    }


def test_doors_are_all_packages_that_users_import(api: Any) -> None:
    packages = {
        f"graphshard.{file.parent.name}"
        for file in (ROOT / "src" / "graphshard").glob("[!_]*/__init__.py")
    }
    assert {"graphshard"} | packages <= set(api.doors())


def test_every_public_name_is_in_the_page_of_its_door(api: Any) -> None:
    pages = api.api_pages()
    for door in api.doors():
        rows = set(re.findall(r"^   \* - (?::py:\w+:)?`+([\w.]+)", pages[f"{door}.md"], re.M))
        assert rows == set(api.public_names(importlib.import_module(door))), door


def test_every_function_and_class_has_one_entry(api: Any) -> None:
    entries = re.findall(
        r"^\.\. auto(?:class|function):: (\S+)$", "\n".join(api.api_pages().values()), re.M
    )
    assert len(entries) == len(set(entries))
    assert set(entries) == set(described(api))


def test_every_entry_has_a_docstring_as_the_house_rules_ask(api: Any) -> None:
    """A summary in a sentence; in ``Args`` names of parameters, without types."""
    wrong = []
    for name, value in described(api).items():
        text = inspect.getdoc(value) or ""
        summary = text.split("\n\n", 1)[0].strip()
        if not summary or not summary.endswith((".", ":", "::", "?", "`")):
            wrong.append(f"{name}: its summary is no sentence: {summary!r}")
        wrong += [
            f"{name}: types belong into the signature: {argument}"
            for argument in re.findall(r"^    (\w+ \([\w., ]+\)): ", text, re.M)
        ]
    assert not wrong, "\n".join(wrong)


def test_every_command_and_its_options_are_listed(api: Any) -> None:
    page = api.api_pages()["commands.md"]
    for name, command in api.commands().items():
        section = re.split(rf"^## graphshard {name}$", page, flags=re.M)[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.name != "help" and parameter.param_type_name == "option":
                assert f"{parameter.opts[0]}" in section, f"{name} {parameter.opts[0]}"


def test_everything_is_staged_and_links_lead_somewhere(site: Any) -> None:
    site.stage(as_committed=True)
    pages = {str(path.relative_to(site.STAGE)) for path in site.STAGE.rglob("*.md")}
    assert {
        "index.md",
        "start.md",
        "changelog.md",
        "api/graphshard.nn.md",
        "examples/sampled.md",
    } <= pages
    assert {f"performance/{file.name}" for file in site.RESULTS.glob("*.md")} <= pages
    for path in site.STAGE.rglob("*.md"):
        text = site.FENCE.sub("", path.read_text(encoding="utf-8"))
        for _, target, _ in site.LINK.findall(text):
            file = target.partition("#")[0]
            if file and "://" not in file:
                assert (path.parent / file).exists(), f"{path}: {target}"


def test_links_are_moved_with_their_pages(site: Any) -> None:
    text = "[a](../../README.md#install) [b](../../examples/sampled.py) [c](pyg.md) `[d](x.md)`"
    moved = site.with_links_of_site(text.split(" `")[0], "docs/guides/gpus.md", "guides/gpus.md")
    assert moved == "[a](../index.md) [b](../examples/sampled.md) [c](pyg.md)"
    code = "```text\n[x](not/a/file.md)\n```"
    assert site.with_links_of_site(code, "docs/index.md", "index.md") == code
    with pytest.raises(AssertionError, match="which is not there"):
        site.with_links_of_site("[x](not/a/file.md)", "docs/index.md", "index.md")


def test_a_shelf_becomes_trees_in_its_order(site: Any) -> None:
    text = (
        "* [b](b.md#part)\n* [a](../x/a.ipynb)\n* [other shelf](../y/index.md)\n* [b again](b.md)"
    )
    page = site.hidden_toctrees(f"{text}\n\n## No page\n\n## More\n\n[c](c.md)", "z/index.md")
    trees = re.findall(r"```\{toctree\}\n:hidden:\n(?::caption: (.+)\n)?\n([^`]+)```", page)
    assert [(caption, tree.split()) for caption, tree in trees] == [
        ("", ["b", "../x/a"]),
        ("More", ["c"]),
    ]


def test_dead_links_are_found(site: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a><a href="b.html#there">2</a><a href="c.html">3</a><a href="https://x">4</a>'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    assert site.dead_links(tmp_path) == ["a.html: b.html#there", "a.html: c.html"]


def test_names_and_options_break_where_they_may(site: Any, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text(
        '<span class="pre">&quot;.[plot]&quot;</span> <span class="pre">a_module.b_name</span>'
        '<div class="highlight-sh notranslate"><pre>train --data a --no-plot</pre></div> --data'
    )
    site.let_names_break(tmp_path)
    assert page.read_text() == (
        '<span class="pre">&quot;.[plot]&quot;</span> <span class="pre">a_</span><wbr>'
        '<span class="pre">module.</span><wbr><span class="pre">b_</span><wbr>'
        '<span class="pre">name</span><div class="highlight-sh notranslate"><pre>train '
        '<span class="option">--data</span> a <span class="option">--no-plot</span></pre></div>'
        " --data"
    )


def test_bars_are_the_cells_of_the_newest_result() -> None:
    pages = site_module("performance_pages")
    kinds = pages.newest_by_kind()
    for files in kinds.values():
        assert [f.stem[-10:] for f in files] == sorted((f.stem[-10:] for f in files), reverse=True)
    index = pages.performance_pages()["index.md"]
    for file in pages.RESULTS.glob("*.md"):
        assert f"]({file.name})" in index
    for chart in pages.CHARTS:
        file = kinds[chart.kind][0]
        columns, rows = pages.table_of(file.read_text(encoding="utf-8"), chart.heading)
        drawn = re.findall(r'class="value">([^<]+)<', pages.bars(chart, file))
        assert drawn == [row[columns.index(chart.column)] for row in rows]


FIGURES = re.compile(r'<!-- figures of ([\w. -]+?)(?:, but "([^"]+)")? -->\n')
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?=x?(?!\w))")


def figures(text: str) -> set[str]:
    """The numbers in a text, with or without an x behind them."""
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def is_figure_of(figure: str, there: set[str]) -> bool:
    """Whether a number is among others, as it is or rounded."""
    decimals = len(figure.partition(".")[2])
    return figure in there or any(
        len(number.partition(".")[2]) > decimals
        and abs(float(number) - float(figure)) <= 0.5000001 * 10**-decimals
        for number in there
    )


def test_figures_in_tables_of_pages_are_those_of_results() -> None:
    """A table of figures names the files of benchmarks/results that have them: none is typed."""
    pages = site_module("performance_pages")
    wrong, tables = [], 0
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for found in re.finditer(rf"({FIGURES.pattern})?((?:^\|.*\n)+)", text, re.M):
            comment, files, left_out, _ = found.groups()
            columns, rows = pages.table_of(found[0], "")
            measured = sum(bool(re.match(r"\d[\d,]*\.\d", cell)) for row in rows for cell in row)
            if comment is None:
                wrong += [f"{page.name}: {' | '.join(columns)}"] if measured > 2 else []
                continue
            tables += 1
            there = set[str]().union(
                *(figures((pages.RESULTS / f).read_text(encoding="utf-8")) for f in files.split())
            )
            for row in rows:
                cells = [c for name, c in zip(columns, row, strict=True) if name != left_out]
                shown = figures(" ".join(cells[1:]))
                lacking = sorted(figure for figure in shown if not is_figure_of(figure, there))
                wrong += [f"{page.name}: {figure} of {row}" for figure in lacking]
    assert tables == 8
    assert not wrong, "\n".join(wrong)


def test_decimals_of_sentences_are_those_of_results() -> None:
    """A paragraph with the comment that tables have takes its decimals from the same files."""
    pages = site_module("performance_pages")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paragraphs = re.findall(rf"{FIGURES.pattern}((?:^[^|\n].*\n)+)", text, re.M)
    for files, _, sentences in paragraphs:
        there = set[str]().union(
            *(figures((pages.RESULTS / f).read_text(encoding="utf-8")) for f in files.split())
        )
        shown = {figure for figure in figures(sentences) if "." in figure}
        assert shown, sentences
        assert not [figure for figure in shown if not is_figure_of(figure, there)], sentences
    assert len(paragraphs) == 5


def test_a_figure_that_a_result_lacks_is_found() -> None:
    there = figures("| 3.65x | 12,060 | 82.74 ± 0.68 | 1e-05 | v0.5 |")
    assert there == {"3.65", "12060", "82.74", "0.68", "1e-05"}
    assert all(is_figure_of(figure, there) for figure in figures("3.7x 12,060 82.7 ± 0.7"))
    assert not any(is_figure_of(figure, there) for figure in figures("3.8x 12,061 82.8 0.5 1206"))


def test_the_picture_is_drawn_of_a_partition(tmp_path: Path) -> None:
    """What it shows as fetched is what the library's parts have as halo; the files are as drawn."""
    drawing = site_module("draw_how_it_works")
    ends = torch.tensor(drawing.EDGES).T
    graph = graphshard.from_edge_index(torch.cat([ends, ends.flip(0)], 1), 8)
    parts = torch.tensor([drawing.owner(node) for node in range(8)])
    mapping = graphshard.partition_graph(
        graph, "g", 2, tmp_path, part_method=parts, quiet=True, return_mapping=True
    )
    assert mapping is not None
    for worker in range(2):
        part = graphshard.partition.load_partition(tmp_path / "g.json", worker)[0]
        halo = part.ndata[graphshard.NID][~part.ndata["inner_node"]]
        assert sorted(mapping[0][halo].tolist()) == drawing.fetched_by(worker)
    for layout in (drawing.WIDE, drawing.NARROW):
        committed = drawing.PICTURES / f"{layout.name}.svg"
        assert committed.read_text(encoding="utf-8") == drawing.draw(layout)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_site_is_built_without_warnings() -> None:
    pytest.importorskip("pydata_sphinx_theme", reason="the extra docs is not installed")
    command = [sys.executable, str(HERE / "build_site.py"), "--as-committed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
