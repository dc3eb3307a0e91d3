# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds the site; `build_site.py` beside this stages its pages and calls Sphinx."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.ext.napoleon.docstring import GoogleDocstring

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from api_pages import places_by_definition  # noqa: E402

project = "graphshard"
author = "The graphshard contributors"
copyright = "The graphshard contributors"
version = release = importlib.metadata.version("graphshard")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
smartquotes_action = "qe"  # not dashes: --option is what one types
root_doc = "index"
exclude_patterns = ["files/**"]
nitpicky = True

# Markdown as GitHub reads it, and fences of colons for what only the site shows.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # build_site.py runs the notebooks, and checks the numbers in their text
nb_merge_streams = True
suppress_warnings = ["misc.highlighting_failure"]  # Pygments: a command of IPython over two lines

# The docstrings: single backticks are names, of which those that have an entry become links.
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
nitpick_ignore_regex = [
    ("py:obj", r".*"),  # a name in backticks need not have an entry: arguments, files, expressions
    ("py:class", r"graphshard\..*"),  # types within the package; public ones are found, see below
    ("py:class", r"[A-Z]\w*"),  # aliases of types, within the package
    ("py:class", r".*\[.*"),  # the first half of a type that autodoc could not evaluate
    ("py:class", r"(scipy|networkx|pyarrow|pa|pandas|dgl|rich)\..*"),  # no inventory of these
    ("py:class", r"torch_geometric\.(sampler|data)\.\w+\..*"),
]

# Inventories are files beside this, so that a build needs no network; GRAPHSHARD_DOCS_ONLINE=1
# fetches today's in their place.
INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch_geometric": "https://pytorch-geometric.readthedocs.io/en/latest/",
}
online = os.environ.get("GRAPHSHARD_DOCS_ONLINE") == "1"
intersphinx_mapping = {
    name: (url, None if online else os.environ["GRAPHSHARD_DOCS_INVENTORIES"] + f"/{name}.inv")
    for name, url in INVENTORIES.items()
}
intersphinx_disabled_reftypes = ["std:*"]

html_theme = "pydata_sphinx_theme"
html_title = "graphshard"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": [], "start": [], "glossary": [], "changelog": []}
html_theme_options = {
    "logo": {"text": "graphshard"},
    "header_links_before_dropdown": 9,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "back_to_top_button": True,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def _returns(self: Any, preprocess_types: bool = False) -> list[tuple[str, str, list[str]]]:
    lines = self._dedent(self._consume_to_next_section())
    return [("", "", lines)] if lines else []


def _property(self: Any) -> tuple[str, list[str]]:
    return "", self._dedent(self._consume_to_end())


# Types are in signatures alone: a colon in what is returned, or in a property, is only a colon.
GoogleDocstring._consume_returns_section = _returns  # type: ignore[method-assign]
GoogleDocstring._consume_inline_attribute = _property  # type: ignore[method-assign]


def _mathml(node: nodes.Element, as_block: bool) -> str:
    formula = re.sub(r"\\[bB]igg?[lrm]?(?![a-zA-Z])", "", node.astext())  # sizes, unknown to it
    formula = re.sub(r"\\dots(?![a-zA-Z])", r"\\ldots", formula)
    tree = latex2mathml.tex2mathml(formula, as_block=as_block)
    return tree if isinstance(tree, str) else tree.toxml()


def visit_math(self: Any, node: nodes.math) -> None:
    """Write a formula of a line as MathML, which browsers draw without a script."""
    self.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula of its own as MathML."""
    self.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def find_where_described(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Lead from the module that defines a class to the door that describes it."""
    place = places_by_definition().get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or place is None:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", place, node, contnode)


def mark_tables_of_words(app: Any, doctree: nodes.document) -> None:
    """Give narrow tables of sentences a class: on a phone their cells stand below each other.

    In wider ones, columns of sentences have one that keeps them readable while the table scrolls;
    tables of many columns have one by which they are set smaller.
    """
    for table in doctree.findall(nodes.table):
        rows = [list(row.findall(nodes.entry)) for row in table.findall(nodes.row)]
        lengths = [len(cell.astext()) for row in rows[1:] for cell in row]
        if rows and 2 <= len(rows[0]) <= 3 and lengths and sum(lengths) / len(lengths) > 10:
            table["classes"].append("words")
        elif rows:
            if len(rows[0]) > 6:
                table["classes"].append("many")
            for column in zip(*rows, strict=False):
                if max(len(cell.astext()) for cell in column[1:] or column) > 40:
                    for cell in column:
                        cell["classes"].append("sentence")


def setup(app: Any) -> dict[str, bool]:
    """Register formulas as MathML: without a network there is no MathJax."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("missing-reference", find_where_described)
    app.connect("doctree-read", mark_tables_of_words)
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
