# SPDX-License-Identifier: Apache-2.0
"""PyG's example programs on 2 ranks with the three-line change, against one process.

    python benchmarks/pyg_examples.py EXAMPLES [--data ../shared/datasets] [--only gcn gat]

EXAMPLES is the folder ``examples`` of a checkout of PyG. Every program there that trains on one
graph is run as it is, in one process, and on 2 ranks with the three lines of the guide, both for a
few epochs, in float64, without dropout and with equal seeds. What is compared: every value that the
program calls ``backward`` on, and every number that it prints. Data sets that cannot be had become
graphs of the same shape, made of arrays in the data folder, or drawn. Writes
``benchmarks/results/pyg_examples_cpu_<date>.md`` if all are run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import random
import re
import runpy
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch_geometric
import torch_geometric.datasets
from _common import markdown_table, write_result
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import graphshard
from graphshard.testing import run_ranks

EPOCHS = 3
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Example:
    """How the three lines go into a program.

    Args:
        data: The data object, as an expression.
        methods: What is computed by all ranks.
        after: What the line begins with that the change follows; by default the last assignment
            of ``model``.
        argv: Arguments of the program.
        model: What the model is called.
    """

    data: str = "data"
    methods: tuple[str, ...] = ("forward",)
    after: str = ""
    argv: tuple[str, ...] = ()
    model: str = "model"


ENCODE = ("encode",)
TRAIN = "train_data"
EXAMPLES: dict[str, Example] = {
    "agnn": Example(),
    "ar_link_pred": Example(
        "torch_geometric.data.Data(edge_index=data.train_pos_edge_index, num_nodes=data.num_nodes)",
        after="encoder =",
        model="encoder",
    ),
    "argva_node_clustering": Example(TRAIN, ENCODE),
    "arma": Example(),
    "autoencoder": Example(TRAIN, ENCODE),
    "compile/gcn": Example(),
    "cora": Example(),
    "correct_and_smooth": Example(),
    "dir_gnn": Example(),
    "dna": Example(),
    "explain/captum_explainer": Example(),
    "explain/gnn_explainer": Example(),
    "explain/gnn_explainer_ba_shapes": Example(),
    "explain/gnn_explainer_link_pred": Example(TRAIN),
    "explain/graphmask_explainer": Example(),
    "gat": Example(),
    "gcn": Example(),
    "gcn2_cora": Example(),
    "glnn": Example(after="gnn =", model="gnn"),
    "graph_unet": Example(),
    "hetero/bipartite_sage": Example(TRAIN),
    "hetero/dmgi_unsup": Example(),
    "hetero/han_imdb": Example(after="data, model ="),
    "hetero/hetero_conv_dblp": Example(after="data, model ="),
    "hetero/hetero_link_pred": Example(TRAIN),
    "hetero/hgt_dblp": Example(after="data, model ="),
    "infomax_transductive": Example(after="data = dataset"),
    "jit/gat": Example(),
    "jit/gcn": Example(),
    "label_prop": Example(),
    "lightgcn": Example(methods=("forward", "get_embedding")),
    "link_pred": Example(TRAIN, ("encode", "decode")),
    "linkx": Example(),
    "mixhop": Example(),
    "ogbn_train": Example(),
    "pmlp": Example(),
    "rect": Example("zs_data"),
    "rgat": Example(),
    "rgcn": Example(),
    "rgcn_link_pred": Example(methods=ENCODE),
    "sgc": Example(),
    "signed_gcn": Example(
        "torch_geometric.data.Data(edge_index=train_pos_edge_index, num_nodes=x.size(0))",
        after="x = model.create",
    ),
    "super_gat": Example(),
    "tagcn": Example(),
    "tensorboard_logging": Example(),
    "unimp_arxiv": Example(),
}
NOTES = {
    "argva_node_clustering": "its encoder draws noise for each node, within the model, where ranks "
    "draw their own",
}
NO_GRAPH_IN_MODEL = {
    "correct_and_smooth": "the model is an MLP",
    "node2vec": "the model walks, and has no layers on edges",
}


# -- data ------------------------------------------------------------------------------------------


class StandIn:
    """A data set of PyG with one graph.

    Args:
        graph: It.
        num_classes: Of labels.
        transform: Called with a copy whenever the graph is read.
    """

    def __init__(self, graph: Data | HeteroData, num_classes: int, transform: Any = None) -> None:
        self._graph, self.num_classes, self.transform = graph, num_classes, transform

    def __getitem__(self, place: int) -> Any:
        copied = self._graph.clone()
        return copied if self.transform is None else self.transform(copied)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([self[0]])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._graph if name == "data" else getattr(self._graph, name)

    def get_idx_split(self) -> dict[str, Tensor]:
        """As OGB gives it."""
        names = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
        return {key: self._graph[name].nonzero().view(-1) for key, name in names.items()}


def planetoid(folder: Path, name: str = "cora") -> Data:
    """A citation graph, features as they are."""
    os.environ["GRAPHSHARD_DATASETS"] = str(folder)
    loaded = graphshard.data.load_dataset(name)
    data = graphshard.data.to_pyg(loaded.graph)
    assert isinstance(data, Data)
    names = {"valid_mask": "val_mask"}
    made = Data(edge_index=data.edge_index)
    for key in ("x", "y", "train_mask", "val_mask", "valid_mask", "test_mask"):
        if key in data:
            made[names.get(key, key)] = data[key]
    made.x = made.x.double()
    return made


def entities(folder: Path, name: str) -> Data:
    """A knowledge graph whose nodes have no features."""
    arrays = {path.stem: np.load(path) for path in (folder / name).glob("*.npy")}
    edges = torch.from_numpy(arrays["edge_index"]).long()
    data = Data(
        edge_index=edges,
        edge_type=torch.from_numpy(arrays["edge_type"]).long(),
        num_nodes=len(arrays["label"]),
    )
    label = torch.from_numpy(arrays["label"]).long()
    for split in ("train", "test"):
        data[f"{split}_idx"] = torch.from_numpy(arrays[f"{split}_idx"]).long()
        data[f"{split}_y"] = label[data[f"{split}_idx"]]
    return data


def three_types(names: tuple[str, str, str], labelled: int) -> HeteroData:
    """Papers, authors, terms, or what they are called; drawn."""
    g = torch.Generator().manual_seed(0)
    data, sizes = HeteroData(), (600, 400, 100)
    for name, size in zip(names, sizes, strict=True):
        data[name].x = torch.randn(size, 24, generator=g, dtype=torch.float64)
    first, size = names[labelled], sizes[labelled]
    data[first].y = data[first].x[:, :3].argmax(1)
    order = torch.randperm(size, generator=g)
    for place, split in enumerate(("train_mask", "val_mask", "test_mask")):
        data[first][split] = torch.zeros(size, dtype=torch.bool)
        data[first][split][order[place::3]] = True
    for name, other in zip(names[1:], sizes[1:], strict=True):
        ends = torch.randint(0, sizes[0] * other, (1500,), generator=g).unique()
        data[names[0], "to", name].edge_index = torch.stack([ends // other, ends % other])
        data[name, "to", names[0]].edge_index = torch.stack([ends % other, ends // other])
    return data


def ratings() -> HeteroData:
    """Users who rate films; drawn."""
    g = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["user"].num_nodes = 150
    data["movie"].x = torch.randn(300, 24, generator=g, dtype=torch.float64)
    ends = torch.randint(0, 150 * 300, (3000,), generator=g).unique()
    data["user", "rates", "movie"].edge_index = torch.stack([ends // 300, ends % 300])
    data["user", "rates", "movie"].edge_label = torch.randint(0, 6, ends.shape, generator=g)
    return data


def bought() -> HeteroData:
    """Users and books, both ways, without features; drawn."""
    g = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["user"].num_nodes, data["book"].num_nodes = 150, 300
    ends = torch.randint(0, 150 * 300, (3000,), generator=g).unique()
    pairs = torch.stack([ends // 300, ends % 300])
    data["user", "rates", "book"].edge_index = pairs
    data["book", "rated_by", "user"].edge_index = pairs.flip(0)
    data["user", "rates", "book"].edge_label_index = pairs[:, ::10]
    return data


def triples(folder: Path) -> Data:
    """FB15k-237's training triples, both ways, and what is predicted; a tenth of them."""
    arrays = {n: np.load(folder / "fb15k-237" / f"{n}.npy") for n in ("train", "valid", "test")}
    head, relation, tail = torch.from_numpy(arrays["train"]).long()[::10].T
    num_relations = int(relation.max()) + 1
    data = Data(
        num_nodes=14541,
        edge_index=torch.stack([torch.cat([head, tail]), torch.cat([tail, head])]),
        edge_type=torch.cat([relation, relation + num_relations]),
        train_edge_index=torch.stack([head, tail]),
        train_edge_type=relation,
    )
    for name in ("valid", "test"):
        head, relation, tail = torch.from_numpy(arrays[name]).long()[:20].T
        data[f"{name}_edge_index"] = torch.stack([head, tail])
        data[f"{name}_edge_type"] = relation % num_relations
    return data


def signed() -> list[Data]:
    """Trust and distrust; drawn."""
    g = torch.Generator().manual_seed(0)
    ends = torch.randint(0, 300, (2, 2000), generator=g)
    return [Data(edge_index=ends, edge_attr=torch.randint(0, 2, (2000,), generator=g) * 2 - 1)]


def many_splits(data: Data) -> Data:
    """Ten columns in each mask."""
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name] = data[name].view(-1, 1).repeat(1, 10)
    return data


def arxiv(folder: Path) -> Data:
    """Labels as OGB has them."""
    data = planetoid(folder)
    data.y = data.y.view(-1, 1)
    return data


class Evaluator:
    """OGB's, of accuracies."""

    def __init__(self, name: str) -> None:
        self.name = name

    def eval(self, given: dict[str, Tensor]) -> dict[str, float]:
        """The share of rows that are right."""
        return {
            "acc": float((given["y_true"].view(-1) == given["y_pred"].view(-1)).double().mean())
        }


def stand_ins(folder: Path) -> dict[str, Any]:
    """Name of a data set of PyG to what is called instead."""

    def of(make: Any, classes: int) -> Any:
        def called(*args: Any, transform: Any = None, pre_transform: Any = None, **_: Any) -> Any:
            callables = [a for a in args if callable(a)]
            graph = make()
            graph = graph if pre_transform is None else pre_transform(graph)
            return StandIn(graph, classes, transform or next(iter(callables), None))

        return called

    return {
        "Planetoid": of(lambda: planetoid(folder), 7),
        "WikipediaNetwork": of(lambda: many_splits(planetoid(folder)), 7),
        "LINKXDataset": of(lambda: many_splits(planetoid(folder)), 7),
        "Entities": lambda *args, **_: _entities(folder),
        "DBLP": of(lambda: three_types(("paper", "author", "conference"), 1), 4),
        "IMDB": of(lambda: three_types(("movie", "director", "actor"), 0), 3),
        "MovieLens": of(ratings, 6),
        "AmazonBook": of(bought, 0),
        "RelLinkPredDataset": lambda *args, **_: _relations(folder),
        "BitcoinOTC": lambda *args, **_: signed(),
    }


def _entities(folder: Path) -> StandIn:
    made = StandIn(entities(folder, "aifb"), 4)
    made.num_relations = 90
    return made


def _relations(folder: Path) -> StandIn:
    made = StandIn(triples(folder), 0)
    made.num_relations = 474
    return made


# -- runs ------------------------------------------------------------------------------------------


def shortened(source: str) -> str:
    """A few epochs, no dropout."""
    source = re.sub(r"range\(1, (\d{2,}|args\.epochs \+ 1)\)", f"range(1, {EPOCHS + 1})", source)
    source = re.sub(r"range\((101|200|201)\)", f"range({EPOCHS})", source)
    source = re.sub(r"\b(p|dropout)=0\.\d+", r"\1=0.0", source)
    source = re.sub(r"range\((edge_type\.numel\(\))\)", r"range(min(20, \1))", source)
    return source.replace("epochs=200", f"epochs={EPOCHS}")


def changed(source: str, example: Example) -> str:
    """With the three lines."""
    lines, last = source.splitlines(), 0
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or node.col_offset > 4:
            continue
        text = lines[node.lineno - 1].strip()
        names = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        if text.startswith(example.after) if example.after else "model" in names:
            last = max(last, node.end_lineno or 0)
    if not last:
        raise ValueError("the program has no model")
    first = lines[last - 1]
    while first.strip() and first[:1] == " " and not re.match(r" {0,4}\w", first):
        last_line = lines.index(first)
        first = lines[last_line - 1]
    indent = re.match(r" *", first).group()  # type: ignore[union-attr]
    call = f"graphshard.pyg.parallelize({example.model}, {example.data}, methods={example.methods})"
    head = "import graphshard, torch_geometric\ngraphshard.initialize_comms()"
    future = [i for i, line in enumerate(lines) if line.startswith("from __future__")]
    lines[last:last] = [f"{indent}{example.model} = {call}"]
    at = future[-1] + 1 if future else 0
    return "\n".join([*lines[:at], head, *lines[at:]]) + "\n"


def run_program(
    rank: int, world_size: int, source: str, argv: tuple[str, ...], data: str
) -> dict[str, Any]:
    """Losses and prints of one program; on ranks every one calls."""
    torch.set_num_threads(1)
    folder, losses, printed = Path(data), [], io.StringIO()
    backward = Tensor.backward

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        losses.append(float(self.detach().double().sum()))
        return backward(self, *args, **kwargs)

    ogb = types.ModuleType("ogb.nodeproppred")
    arxiv_set = StandIn(arxiv(folder), 7)
    ogb.PygNodePropPredDataset = (  # type: ignore[attr-defined]
        lambda *args, transform=None, **_: StandIn(
            arxiv_set.data, 7, transform or next((a for a in args if callable(a)), None)
        )
    )
    ogb.Evaluator = Evaluator  # type: ignore[attr-defined]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "program.py"
        path.write_text(source, encoding="utf-8")
        for name, made in stand_ins(folder).items():
            stack.enter_context(mock.patch.object(torch_geometric.datasets, name, made))
        stack.enter_context(mock.patch.object(Tensor, "backward", noted))
        stack.enter_context(mock.patch.object(graphshard, "initialize_comms"))
        stack.enter_context(
            mock.patch.object(torch.nn.functional, "dropout", lambda x, *_, **__: x)
        )
        modules = {"ogb": types.ModuleType("ogb"), "ogb.nodeproppred": ogb}
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        stack.enter_context(mock.patch.object(sys, "argv", ["program.py", *argv]))
        stack.enter_context(contextlib.redirect_stdout(printed))
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.set_default_dtype(torch.float32)
    return {"losses": losses, "printed": numbers(printed.getvalue())}


def numbers(printed: str) -> list[float]:
    """What a program prints, without times."""
    lines = [line for line in printed.splitlines() if "time" not in line.lower()]
    return [float(x) for x in re.findall(r"-?\d+\.\d+", "\n".join(lines))]


def reason(error: BaseException) -> str:
    """Why a program failed: what the first rank said that says it."""
    raised = [
        line.strip().removeprefix("E").strip()
        for line in str(error).splitlines()
        if re.match(r"^\s*(\w+\.)*\w*(Error|Exception|Exit|Interrupt)\b.*", line)
        and "RankError" not in line
    ]
    lines = raised or [line for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {error}" if not lines else lines[0]
    text = re.sub(r"/[\w./+-]*/", "", text)  # folders of this machine
    return text[:260].replace("|", "/")


def compare(name: str, folder: Path, data: Path, ranks: int) -> tuple[str, str, str]:
    """One row of the table: verdict, numbers compared, and what there is to say."""
    example = EXAMPLES[name]
    source = shortened((folder / f"{name}.py").read_text(encoding="utf-8"))
    timeout = 100.0
    try:
        (alone,) = run_ranks(run_program, 1, source, example.argv, str(data), timeout=timeout)
    except Exception as error:
        return "not here", "", f"one process: {reason(error)}"
    if name in NO_GRAPH_IN_MODEL:
        return "no use", "", NO_GRAPH_IN_MODEL[name]
    try:
        source = changed(source, example)
        first, *others = run_ranks(
            run_program, ranks, source, example.argv, str(data), timeout=timeout
        )
    except Exception as error:
        text = reason(error)
        return ("stops" if "NotImplementedError" not in text else "refused"), "", text
    gaps = {}
    for key in ("losses", "printed"):
        a, b = np.array(alone[key]), np.array(first[key])
        if a.shape != b.shape:
            gaps[key] = float("inf")
        else:
            gap = np.abs(a - b) / np.maximum(np.abs(a), 1e-3)
            gaps[key] = float(np.nan_to_num(gap, nan=0.0).max(initial=0.0))
    same_on_ranks = all(other["losses"] == first["losses"] for other in others)
    count = f"{len(alone['losses'])} losses, {len(alone['printed'])} prints"
    gap = f"largest difference: losses {gaps['losses']:.1e}, prints {gaps['printed']:.1e}"
    gap += "" if same_on_ranks else "; ranks differ from each other"
    is_equal = gaps["losses"] < TOLERANCE and gaps["printed"] < 2e-3
    if not is_equal and name in NOTES:
        gap += f"; {NOTES[name]}"
    return ("equal" if is_equal else "other numbers"), count, gap


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/datasets"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    rows = []
    for name in args.only or EXAMPLES:
        if not (args.examples / f"{name}.py").exists():
            rows.append([name, "not here", "", "this checkout has no such file"])
            continue
        rows.append([name, *compare(name, args.examples, args.data.absolute(), args.ranks)])
        sys.stderr.write(" | ".join(rows[-1]) + "\n")
    table = markdown_table(["program", f"{args.ranks} ranks", "compared", "why"], rows)
    if args.only:
        sys.stdout.write("\n".join(table) + "\n")
        return
    verdicts = [row[1] for row in rows]
    ran = [v for v in verdicts if v in ("equal", "other numbers")]
    able = [v for v in verdicts if v not in ("not here", "no use")]
    body = [
        f"{len(rows)} programs of PyG {torch_geometric.__version__}'s examples that train on one "
        f"graph. {len(able)} of them run here in one process and have a model on a graph: "
        f"{len(ran)} run on {args.ranks} ranks with the three lines, {verdicts.count('equal')} "
        "give one process's numbers. float64, no dropout, equal seeds, "
        f"{EPOCHS} epochs; equal: losses to {TOLERANCE}, prints to their last digit. Cora in the "
        "place of all citation and web graphs and of ogbn-arxiv, AIFB, a tenth of FB15k-237; "
        "DBLP, IMDB, MovieLens, AmazonBook and BitcoinOTC are drawn.",
        "",
        *table,
    ]
    sys.argv[1:] = ["EXAMPLES"]  # folders of this machine are of no use to others
    write_result("pyg_examples", "PyG's example programs on ranks, with the three lines", body)


if __name__ == "__main__":
    main()
