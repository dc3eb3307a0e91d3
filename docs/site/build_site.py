# SPDX-License-Identifier: Apache-2.0
"""Build the site: run the notebooks, stage the pages, have Sphinx write them, check the links.

    python docs/site/build_site.py                     # all of it, into build/site
    python docs/site/build_site.py --as-committed      # notebooks with the outputs as committed
    python docs/site/build_site.py --stage-only        # the pages that Sphinx reads, and no more

Sphinx reads ``build/site-source``: the pages of ``docs/``, in which links to other files of the
repository lead to their places on the site, and those that are made from other files: the API (from
docstrings), the gallery (from ``examples/``), performance (from ``benchmarks/results``). Needs
no network. A warning of Sphinx, or an internal link that leads nowhere, ends it with 1.
"""

from __future__ import annotations

import argparse
import ast
import html
import html.parser
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HERE = DOCS / "site"
STAGE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))

sys.path[:0] = [str(DOCS), str(HERE)]
from api_pages import DOOR, api_pages  # noqa: E402
from performance_pages import performance_pages  # noqa: E402
from run_notebooks import run_notebook  # noqa: E402

FENCE = re.compile(r"^(`{3,}|:{3,}).*?^\1`*:*[ \t]*$", re.M | re.S)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")

# Files of the repository that are pages of the site under another name.
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "SECURITY.md": "development/security.md",
    "docs": "index.md",
    "examples": "examples/index.md",
    "examples/README.md": "examples/index.md",
    "benchmarks/results": "performance/index.md",
}


def place_of(path: str) -> str | None:
    """Where a file of the repository is on the site, relative to its root; None if it is not."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/") and path.endswith((".md", ".ipynb")):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith(".py"):
        return path.removesuffix(".py") + ".md"
    if path.startswith("benchmarks/results/") and path.endswith(".md"):
        return "performance/" + Path(path).name
    return None


def relative(target: str, page: str) -> str:
    """A link from one page of the site to another file of it."""
    return os.path.relpath(target, Path(page).parent)


def with_links_of_site(text: str, source: str, page: str) -> str:
    """A page's text with its links leading to their targets' places on the site.

    Args:
        text: Markdown, or the JSON of a notebook.
        source: The file of the repository that it is from; links are relative to it.
        page: Its own place on the site.

    Raises:
        AssertionError: A link leads to nothing in the repository.
    """

    def lead(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path, hash_mark, fragment = target.partition("#")
        if "://" in target or not path or target.startswith("mailto:"):
            return match[0]
        wanted = os.path.normpath(Path(source).parent / path)
        file = ROOT / wanted
        assert file.exists(), f"{source} links to {target}, which is not there"
        if wanted.endswith(".svg"):
            return match[0]  # a drawing, which comes to stand in the page
        place = place_of(wanted)
        if place is None:
            assert file.is_file(), f"{source} links to the folder {target}: link a file of it"
            place = f"files/{wanted}"
            write(STAGE / place, file.read_text(encoding="utf-8"))
        if wanted == "README.md":  # the front page has other headings
            hash_mark = fragment = ""
        return f"{before}{relative(place, page)}{hash_mark}{fragment}{after}"

    pieces, last = [], 0
    fences = [] if source.endswith(".ipynb") else list(FENCE.finditer(text))
    for fence in fences:
        is_code = not fence[0].startswith(":")
        pieces.append(LINK.sub(lead, text[last : fence.start()]))
        pieces.append(fence[0] if is_code else LINK.sub(lead, fence[0]))
        last = fence.end()
    pieces.append(LINK.sub(lead, text[last:]))
    return "".join(pieces)


PICTURE = re.compile(r"^!\[[^]]*\]\((pictures/[\w.]+\.svg)\)$", re.M)


def with_drawings(text: str) -> str:
    """A page with its drawings in it, so that they take the colours of the theme.

    Where there is a narrow one, too, phones show that.
    """

    def draw(match: re.Match[str]) -> str:
        wide = DOCS / match[1]
        narrow = wide.with_name(f"{wide.stem}_narrow.svg")
        files = {"picture": wide, **({"picture narrow": narrow} if narrow.exists() else {})}
        return "\n".join(
            f'<div class="{kind}">\n{file.read_text(encoding="utf-8")}</div>'
            for kind, file in files.items()
        )

    return PICTURE.sub(draw, text)


def write(path: Path, text: str) -> None:
    """Write a staged file where it differs, so that Sphinx reads again only what has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    STAGED.add(path)


STAGED: set[Path] = set()


def hidden_toctrees(text: str, page: str) -> str:
    """A shelf's page, and trees of the pages that it links to: in its order, under its headings."""
    folder = Path(page).parent
    seen: set[str] = set()
    trees = []
    _, *sections = re.split(r"^## (.*)$", "## \n" + FENCE.sub("", text), flags=re.M)
    for heading, section in zip(sections[::2], sections[1::2], strict=True):
        entries = []
        for _, target, _ in LINK.findall(section):
            path = target.partition("#")[0]
            if path in seen or not path.endswith((".md", ".ipynb")) or "://" in path:
                continue
            seen.add(path)
            if Path(os.path.normpath(folder / path)).name != "index.md":
                entries.append(str(Path(path).with_suffix("")))
        caption = f":caption: {heading}\n" if heading else ""
        tree = "\n".join(entries)
        if entries:
            trees.append(f"```{{toctree}}\n:hidden:\n{caption}\n{tree}\n```\n")
    return "\n\n".join([text, *trees])


def stage_docs() -> None:
    """The pages of docs/, the changelog, and how to contribute."""
    names = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    sources = [*DOCS.rglob("*.md"), *(ROOT / name for name in names)]
    for file in sources:
        source = str(file.relative_to(ROOT))
        page = place_of(source)
        assert page is not None
        text = file.read_text(encoding="utf-8")
        text = with_links_of_site(text, source, page)
        text = re.sub(r"^```output$", "```text", text, flags=re.M)
        text = with_drawings(text)
        if page == "api/index.md":
            text = (
                DOOR.sub(r"* [`\1`](\1.md): \2", text)
                + "\n* [Commands](commands.md): `graphshard ...`\n"
            )
        if page.endswith("/index.md"):
            text = hidden_toctrees(text, page)
        write(STAGE / page, text)


def stage_notebooks(as_committed: bool) -> None:
    """The notebooks with their outputs: of a run now, or those that are committed."""
    import nbformat

    for file in NOTEBOOKS:
        notebook = nbformat.read(file, 4) if as_committed else run_notebook(file)
        source = str(file.relative_to(ROOT))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = with_links_of_site(cell.source, source, place_of(source) or "")
        write(STAGE / (place_of(source) or ""), nbformat.writes(notebook))


def stage_examples() -> None:
    """The gallery: a card for each example, with what its docstring says, and its page."""
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    after = readme.split("\n\nRun them", 1)[1]
    parts = [
        "# Examples\n\nOne file each, to be read from top to bottom; each runs on a laptop CPU in"
        " well under a minute.\n\n::::{grid} 1 1 2 2\n:gutter: 3\n"
    ]
    entries = []
    files = [*EXAMPLES.glob("*.py"), *(EXAMPLES / "pyg").glob("*.py")]
    for file in sorted(
        files, key=lambda f: (f.parent != EXAMPLES, readme.find(f"({f.relative_to(EXAMPLES)})"))
    ):
        code = file.read_text(encoding="utf-8")
        doc = ast.get_docstring(ast.parse(code)) or ""
        summary, _, rest = doc.partition("\n\n")
        summary = " ".join(summary.split())
        name = str(file.relative_to(EXAMPLES))
        place = name.removesuffix(".py")
        title = summary.partition(":")[0].rstrip(".")
        words = f"# {name}\n\n{summary}\n\n" + rest.replace("::\n", ":\n").replace("``", "`")
        page = (
            f"{words}\n\n"
            f"```{{literalinclude}} {relative('files/examples/' + name, 'examples/' + name)}\n"
            ":language: python\n```\n"
        )
        write(STAGE / "files" / "examples" / name, code)
        write(STAGE / "examples" / f"{place}.md", page)
        entries.append(place)
        parts.append(
            f":::{{grid-item-card}} {name}\n:link: {place}\n:link-type: doc\n\n{title}.\n:::\n"
        )
    tree = "\n".join(entries)
    after = with_links_of_site("Run them" + after, "examples/README.md", "examples/index.md")
    parts.append(f"::::\n\n{after}\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n")
    write(STAGE / "examples" / "index.md", "\n".join(parts))


def stage_inventories(folder: Path) -> None:
    """Inventories for intersphinx, of the tables in ``docs/site/inventories``."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in (HERE / "inventories").glob("*.txt"):
        head = f"# Sphinx inventory version 2\n# Project: {table.stem}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        rows = [row.split() for row in table.read_text(encoding="utf-8").splitlines()]
        lines = [f"{name} {role} 1 {uri} -" for role, name, uri in (r for r in rows if len(r) == 3)]
        body = zlib.compress("\n".join([*lines, ""]).encode())
        (folder / f"{table.stem}.inv").write_bytes(head.encode() + body)


def stage(as_committed: bool) -> None:
    """Write all that Sphinx reads, and remove what an earlier build has left there."""
    STAGED.clear()
    stage_docs()
    for name, text in api_pages().items():
        write(STAGE / "api" / name, text)
    for name, text in performance_pages().items():
        source = f"benchmarks/results/{name}"
        write(STAGE / "performance" / name, with_links_of_site(text, source, f"performance/{name}"))
    stage_examples()
    stage_notebooks(as_committed)
    for file in STAGE.rglob("*"):
        if file.is_file() and file not in STAGED:
            file.unlink()


class Page(html.parser.HTMLParser):
    """The links and the ids of a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, and its id."""
        for name, value in attrs:
            if value and name in ("href", "src") and tag in ("a", "img", "link", "script"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.ids.add(value)


def dead_links(site: Path) -> list[str]:
    """Links within the site that lead to no file, or to no place of one, as ``page: link``."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    pages = {path: page for path, page in pages.items() if "_static" not in path.parts}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, fragment = link.partition("#")
            if "://" in link or link.startswith(("mailto:", "data:", "//")):
                continue
            target = unquote(target.partition("?")[0])
            other = (path.parent / target).resolve() if target else path
            is_there = other.exists()
            if is_there and fragment and other in pages:
                is_there = unquote(fragment) in pages[other].ids
            if not is_there:
                dead.append(f"{path.relative_to(site)}: {link}")
    return sorted(set(dead))


BACK = re.compile(r'<a (?:class="viewcode-back" )?href="([^"]+)">(.*?)</a>')


def remove_dead_back_links(site: Path) -> None:
    """Take out links of source pages to entries that stand under the name of another door."""
    dead = {tuple(line.split(": ", 1)) for line in dead_links(site) if line.startswith("_modules/")}
    for page in {page for page, _ in dead}:
        file = site / page
        text = file.read_text(encoding="utf-8")

        def without(match: re.Match[str], page: str = page) -> str:
            link = html.unescape(match[1])
            if (page, link) not in dead:
                return match[0]
            return "" if "viewcode-back" in match[0] else match[2]

        file.write_text(BACK.sub(without, text), encoding="utf-8")


PIECE = re.compile(r'<span class="pre">([^<]{13,})</span>')
COMMANDS = re.compile(r'<div class="highlight-(?:sh|bash) .*?</pre>', re.S)
OPTION = re.compile(r"(?<![\w-])--[\w-]+")
END_OF_PIECE = re.compile(r"(?<=[._/=,(\[])(?=[\w\[])")


def let_names_break(site: Path) -> None:
    """Let long names in a line of text break behind a dot, a slash or an underscore only.

    Options in commands do not break behind their dashes.
    """

    def pieces(match: re.Match[str]) -> str:
        name = html.unescape(match[1])
        words = END_OF_PIECE.split(name) if len(name) > 12 else [name]
        return "<wbr>".join(
            f'<span class="pre{" long" if len(word) > 26 else ""}">{html.escape(word)}</span>'
            for word in words
        )

    def options(match: re.Match[str]) -> str:
        return OPTION.sub(r'<span class="option">\g<0></span>', match[0])

    for file in site.rglob("*.html"):
        if "_modules" not in file.parts:
            text = file.read_text(encoding="utf-8")
            text = COMMANDS.sub(options, PIECE.sub(pieces, text))
            file.write_text(text, encoding="utf-8")


def main() -> int:
    """Build the site; the number of failures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--as-committed", action="store_true", help="do not run the notebooks")
    parser.add_argument("--stage-only", action="store_true", help="do not call Sphinx")
    arguments = parser.parse_args()
    stage(arguments.as_committed)
    if arguments.stage_only:
        return 0
    inventories = ROOT / "build" / "site-inventories"
    stage_inventories(inventories)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html"]
    command += ["-c", str(HERE), "-d", str(ROOT / "build" / "site-doctrees"), str(STAGE), str(SITE)]
    shutil.rmtree(SITE, ignore_errors=True)
    environ = {**os.environ, "GRAPHSHARD_DOCS_INVENTORIES": str(inventories)}
    done = subprocess.run(command, env=environ, check=False)
    remove_dead_back_links(SITE)
    let_names_break(SITE)
    dead = dead_links(SITE)
    print(*(f"dead link: {line}" for line in dead), sep="\n")
    number = len(list(SITE.rglob("*.html")))
    print(f"{number} pages in {SITE.relative_to(ROOT)}, {len(dead)} dead links")
    return 1 if done.returncode or dead else 0


if __name__ == "__main__":
    raise SystemExit(main())
