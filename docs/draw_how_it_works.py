# SPDX-License-Identifier: Apache-2.0
"""Draw how graphshard works: `docs/pictures/how_it_works.svg`, and a narrow one for phones.

    python docs/draw_how_it_works.py

What a worker fetches, and which edges are cut, is computed from `EDGES` and `PARTS`; a test
compares it with a partition that the library makes, and the files with what this draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"

EDGES = [(0, 1), (0, 2), (1, 3), (2, 3), (4, 5), (4, 6), (5, 6), (5, 7), (6, 7)]
EDGES += [(1, 4), (2, 6), (3, 6)]
PARTS = [[0, 1, 2, 3], [4, 5, 6, 7]]

# Where nodes are in the drawing of the whole graph, and within the box of their worker.
WHOLE = {0: (60, 90), 1: (120, 70), 2: (80, 160), 3: (140, 140)}
WHOLE |= {4: (215, 80), 5: (255, 130), 6: (200, 165), 7: (230, 225)}
IN_BOX = {0: (45, 70), 1: (105, 55), 2: (60, 145), 3: (125, 120)}
IN_BOX |= {4: (125, 50), 5: (170, 95), 6: (115, 125), 7: (195, 165)}

STYLE = """\
.ROOT { --ink: #24292f; --soft: #57606a; --paper: #ffffff; --a: #0b6bcb; --b: #b35900; --wash-a: #e3f0fc; --wash-b: #fdf0e0; }
@media (prefers-color-scheme: dark) { .ROOT { --ink: #e6edf3; --soft: #9da7b3; --paper: #14181e; --a: #79c0ff; --b: #ffb066; --wash-a: #12283d; --wash-b: #38270f; } }
.ROOT text { font: 14px system-ui, sans-serif; fill: var(--ink); }
.ROOT .head { font-weight: 600; font-size: 15px; }
.ROOT .soft { fill: var(--soft); font-size: 13px; }
.ROOT .id { font-size: 13px; font-weight: 600; fill: var(--paper); text-anchor: middle; }
.ROOT .edge { stroke: var(--soft); stroke-width: 1.6; fill: none; }
.ROOT .cut { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 5 4; fill: none; }
.ROOT .n0 { fill: var(--a); } .ROOT .n1 { fill: var(--b); }
.ROOT .h0 { fill: var(--paper); stroke: var(--a); stroke-width: 2; stroke-dasharray: 3 2; }
.ROOT .h1 { fill: var(--paper); stroke: var(--b); stroke-width: 2; stroke-dasharray: 3 2; }
.ROOT .id0 { fill: var(--a); } .ROOT .id1 { fill: var(--b); }
.ROOT .w0 { fill: var(--wash-a); stroke: var(--a); } .ROOT .w1 { fill: var(--wash-b); stroke: var(--b); }
.ROOT .from0 { stroke: var(--a); stroke-width: 2.5; fill: none; } .ROOT .from1 { stroke: var(--b); stroke-width: 2.5; fill: none; }
.ROOT .mid { text-anchor: middle; }"""  # noqa: E501


Places = dict[int, tuple[float, float]]


@dataclass(frozen=True)
class Layout:
    """Where things are on a picture of one width; (x, y) of left upper corners, and of first lines.

    Args:
        name: The file without its suffix, and the class of its root.
        size: Width and height.
        cut_caption: The lines beside or below the whole graph, and where they are.
        heads: Where the second, the third and the fourth heading are; a text may take two lines.
        boxes: Where the boxes of the workers are.
        box: Their width and height.
        stretch: Width of the drawing of a worker's own nodes, relative to `IN_BOX`.
        fetched_x: Where fetched nodes stand in each box.
        arrows: From where to where rows go, from worker 0 and from worker 1, and where it is said.
        outcome: The lines of the last box, and its left upper corner.
    """

    name: str
    size: tuple[int, int]
    cut_caption: tuple[tuple[str, ...], tuple[int, int]]
    heads: tuple[tuple[tuple[str, ...], tuple[int, int]], ...]
    boxes: tuple[tuple[int, int], tuple[int, int]]
    box: tuple[int, int]
    stretch: float
    fetched_x: tuple[int, int]
    arrows: tuple[tuple[int, int, int, int, int], ...]
    outcome: tuple[tuple[str, ...], tuple[int, int]]


FORWARD = ("Own and fetched rows, for the own", "nodes: all fetched at once, or one", "part's rows after another's.")  # fmt: skip # noqa: E501
BACKWARD = ("To the owners of fetched rows;", "those of the weights are summed", "over all workers.")  # fmt: skip # noqa: E501

WIDE = Layout(
    name="how_it_works",
    size=(900, 440),
    cut_caption=(("Few edges cross (dashed),", "both sides weigh the same."), (20, 285)),
    heads=(
        (("2. A worker holds one part, and fetches the rows it lacks",), (330, 28)),
        (("3. Forward: aggregate",), (330, 278)),
        (("4. Backward: gradients",), (645, 278)),
    ),
    boxes=((330, 50), (645, 50)),
    box=(235, 190),
    stretch=1.0,
    fetched_x=(195, 45),
    arrows=((572, 110, 636, 604, 100), (638, 190, 574, 604, 180)),
    outcome=(
        ("Loss, outputs and every gradient are those of one process that holds the whole graph.",),
        (20, 370),
    ),
)
NARROW = Layout(
    name="how_it_works_narrow",
    size=(400, 865),
    cut_caption=(("Few edges", "cross (dashed),", "both sides", "weigh the", "same."), (285, 100)),
    heads=(
        (("2. A worker holds one part,", "and fetches the rows it lacks"), (20, 280)),
        (("3. Forward: aggregate",), (20, 605)),
        (("4. Backward: gradients",), (20, 705)),
    ),
    boxes=((10, 320), (205, 320)),
    box=(185, 190),
    stretch=0.8,
    fetched_x=(160, 28),
    arrows=((80, 540, 320, 200, 533), (320, 570, 80, 200, 563)),
    outcome=(
        (
            "Loss, outputs and every gradient are those of",
            "one process that holds the whole graph.",
        ),
        (10, 785),
    ),
)


def owner(node: int) -> int:
    """The worker that owns a node."""
    return 0 if node in PARTS[0] else 1


def fetched_by(worker: int) -> list[int]:
    """The nodes of the other worker whose rows a worker needs: they have an edge into its part."""
    ends = [end for edge in EDGES for end in (edge, edge[::-1])]
    return sorted({u for u, v in ends if owner(v) == worker and owner(u) != worker})


def lines(texts: tuple[str, ...], x: int, y: int, kind: str, step: int = 20) -> list[str]:
    """Lines of text, the first at (x, y)."""
    return [
        f'<text x="{x}" y="{y + step * number}" class="{kind}">{text}</text>'
        for number, text in enumerate(texts)
    ]


def edge_path(edges: list[tuple[int, int]], places: Places, kind: str) -> str:
    """Edges as one path."""
    steps = "".join(
        f"M{places[u][0]:g} {places[u][1]:g} {places[v][0]:g} {places[v][1]:g}" for u, v in edges
    )
    return f'<path class="{kind}" d="{steps}"/>'


def dots(nodes: list[int], places: Places, fetched: bool) -> list[str]:
    """Nodes with their numbers: filled where they are owned, dashed where they are fetched."""
    drawn = []
    for node in nodes:
        x, y = places[node]
        kind, text = (
            (f"h{owner(node)}", f"id id{owner(node)}") if fetched else (f"n{owner(node)}", "id")
        )
        drawn.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="14"/>')
        drawn.append(f'<text class="{text}" x="{x:g}" y="{y + 5:g}">{node}</text>')
    return drawn


def worker_box(worker: int, layout: Layout) -> list[str]:
    """A worker's part: its own nodes, those it fetches, and the edges between them."""
    (left, top), (width, height) = layout.boxes[worker], layout.box
    shift = 0 if worker == 0 else width - layout.stretch * 235
    places: Places = {
        node: (left + shift + layout.stretch * IN_BOX[node][0], top + IN_BOX[node][1])
        for node in PARTS[worker]
    }
    fetched = fetched_by(worker)
    for number, node in enumerate(fetched):
        spread = 110 if len(fetched) > 1 else 0
        y = top + 60 + spread * number / max(1, len(fetched) - 1)
        places[node] = (left + layout.fetched_x[worker], y)
    own = [(u, v) for u, v in EDGES if u in places and v in places]
    own = [(u, v) for u, v in own if worker in (owner(u), owner(v))]
    return [
        f'<rect class="w{worker}" x="{left}" y="{top}" width="{width}" height="{height}" rx="12"/>',
        *lines((f"worker {worker}",), left + 15, top + 24, "head"),
        edge_path(own, places, "edge"),
        *dots(PARTS[worker], places, fetched=False),
        *dots(fetched, places, fetched=True),
    ]


def draw(layout: Layout) -> str:
    """The picture as SVG."""
    width, height = layout.size
    root, tip = layout.name.replace("_", "-"), f"{layout.name}_tip"
    whole = Places(WHOLE)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing {root}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="{root}-title {root}-text">',
        "<!-- SPDX-License-Identifier: Apache-2.0. Drawn by docs/draw_how_it_works.py; the site "
        "gives it the colours of its theme. -->",
        f'<title id="{root}-title">How graphshard works</title>',
        f'<desc id="{root}-text">A graph of {len(WHOLE)} nodes is cut into two parts. Each worker '
        "owns one part and the edges into it. In each layer a worker fetches the rows of remote "
        "sources from their owner, and aggregates; backward sends gradients the other way.</desc>",
        f"<style>\n{STYLE.replace('ROOT', root)}\n</style>",
        f'<defs><marker id="{tip}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" '
        'fill="context-stroke"/></marker></defs>',
        *lines(("1. The graph is cut",), 20, 28, "head"),
        edge_path([e for e in EDGES if owner(e[0]) == owner(e[1])], whole, "edge"),
        edge_path([e for e in EDGES if owner(e[0]) != owner(e[1])], whole, "cut"),
        '<path d="M172 50V240" stroke="var(--ink)" stroke-width="1.2" stroke-dasharray="2 5"/>',
        *dots(sorted(WHOLE), whole, fetched=False),
        *lines(layout.cut_caption[0], *layout.cut_caption[1], "soft"),
    ]
    for (texts, (x, y)), explained in zip(layout.heads, ((), FORWARD, BACKWARD), strict=True):
        parts += lines(texts, x, y, "head")
        parts += lines(explained, x, y + 24, "soft")
    for worker, (start, y, end, middle, text_y) in enumerate(layout.arrows):
        parts += worker_box(worker, layout)
        sent = " ".join(map(str, fetched_by(1 - worker)))
        parts.append(
            f'<path class="from{worker}" d="M{start} {y}H{end}" marker-end="url(#{tip})"/>'
        )
        parts += lines((sent,), middle, text_y, "soft mid")
    texts, (x, y) = layout.outcome
    parts.append(
        f'<rect x="{x}" y="{y}" width="{width - 2 * x}" height="{30 + 20 * len(texts)}" rx="10" '
        'fill="none" stroke="var(--soft)"/>'
    )
    parts += lines(texts, width // 2, y + 30, "mid")
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Write both pictures."""
    for layout in (WIDE, NARROW):
        (PICTURES / f"{layout.name}.svg").write_text(draw(layout), encoding="utf-8")


if __name__ == "__main__":
    main()
