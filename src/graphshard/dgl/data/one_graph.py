# SPDX-License-Identifier: Apache-2.0
"""Data sets of one graph, from local files: OGB's, Reddit, and the others that DGL downloads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..._base.files import read_json_regular, read_text_regular
from ...data import from_ogb
from ...data.dataset import MASKS
from ...data.npy import read_npz
from ...errors import GraphValueError
from ...graph import Graph, from_scipy, graph, heterograph, to_bidirected
from ..graphs._order import by_destination
from .dgl_dataset import OneGraphDataset, RawOrSavedDataset, get_dgl_url

__all__ = [
    "AmazonCoBuyComputerDataset", "AmazonCoBuyPhotoDataset", "CoauthorCSDataset",
    "CoauthorPhysicsDataset", "CoraFull", "CoraFullDataset", "DglNodePropPredDataset",
    "FB15k237Dataset", "FB15kDataset", "FlickrDataset", "FraudAmazonDataset", "FraudDataset",
    "FraudYelpDataset", "RedditDataset", "WN18Dataset", "WikiCSDataset", "YelpDataset",
]  # fmt: skip

_SPLITS = {"train": "train", "valid": "val", "test": "test"}
"""OGB's names of the sets, and ours."""


class DglNodePropPredDataset:
    """OGB's data set of one graph: ``dataset[0]`` is the graph and the labels.

    The class of that name in ``ogb`` needs DGL; this one reads the same files, see `from_ogb`. Node
    fields are ``feat`` and, without the ``node_`` of their files, the others; labels and sets are
    not among them.
    """

    def __init__(self, name: str, root: str | os.PathLike[str] = "dataset") -> None:
        self._data = from_ogb(name, root)
        self.name, self.num_classes = name, self._data.num_classes
        self._is_typed = len(self._data.graph.ntypes) > 1

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Graph, Any]:
        """The graph, and labels ``[num_nodes, num_tasks]`` (by node type, if it has several)."""
        if index != 0:
            raise IndexError(f"the data set has one graph, number 0 (got {index})")
        data, target = self._data, self._data.target
        g = data.graph.local_var()
        for ntype in g.ntypes:
            _rename(g.nodes[ntype].data, "node_")
        for etype in g.canonical_etypes:
            _rename(g.edges[etype].data, "edge_")
        fields = g.nodes[target].data
        labels = fields.pop("label")
        for mask in MASKS:
            del fields[mask]
        labels = labels.view(len(labels), -1)
        return g, {target: labels} if self._is_typed else labels

    def get_idx_split(self) -> dict[str, Any]:
        """``"train"``, ``"valid"`` and ``"test"`` to node ids; or to node type to ids."""
        data = self._data
        split = {theirs: data.node_ids(ours) for theirs, ours in _SPLITS.items()}
        return {k: {data.target: v} for k, v in split.items()} if self._is_typed else split


def _rename(fields: Any, prefix: str) -> None:
    for name in list(fields):
        if name.startswith(prefix):
            fields[name.removeprefix(prefix)] = fields.pop(name)


_ENDS, _NODES = ("row", "col", "shape"), ("feature", "label", "node_types")


class RedditDataset(RawOrSavedDataset):
    """232,965 posts, 114,615,892 edges, 602 features, 41 communities.

    Read is ``reddit_graph.npz`` (``reddit_self_loop_graph.npz`` with self loops) with
    ``reddit_data.npz``, or DGL's ``dgl_graph.bin``. Nodes are numbered by reverse Cuthill-McKee and
    edges by destination, as in DGL.
    """

    _raw = ("{}_graph.npz", "reddit_data.npz")
    num_classes = 41

    def __init__(
        self,
        self_loop: bool = False,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        self._title = "reddit_self_loop" if self_loop else "reddit"
        super().__init__(raw_dir, force_reload, verbose, transform)

    def _from_raw(self, *files: Path) -> Graph:
        edges, nodes = files
        ends, rows = read_npz(edges, _ENDS.__contains__), read_npz(nodes, _NODES.__contains__)
        for path, arrays, names in ((edges, ends, _ENDS), (nodes, rows, _NODES)):
            if set(arrays) != set(names):
                raise GraphValueError(
                    f"{path} must have the arrays {', '.join(names)}; get it again"
                )
        count = len(rows["label"])
        shape = ends["shape"].tolist()
        if any(len(rows[name]) != count for name in _NODES) or shape != [count] * 2:
            raise GraphValueError(
                f"{edges} and {nodes} must have the same nodes (got {shape} and {count}); get them "
                "again"
            )
        g = graph(_ids(ends["row"], ends["col"]), num_nodes=count)
        for number, mask in enumerate(MASKS, 1):
            g.ndata[mask] = torch.from_numpy(rows["node_types"] == number)
        g.ndata["feat"] = torch.from_numpy(rows["feature"].astype(np.float32))
        g.ndata["label"] = torch.from_numpy(rows["label"].astype(np.int64))
        return by_destination(g)


def _ids(*arrays: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(ids.astype(np.int64)) for ids in arrays)


class GNNBenchmarkDataset(RawOrSavedDataset):
    """Base of the sets of "Pitfalls of Graph Neural Network Evaluation", with ``feat``, ``label``.

    Source: Shchur, Mumme, Bojchevski and Günnemann, 2018, https://arxiv.org/abs/1811.05868. Read is
    the set's ``.npz`` file, or DGL's ``dgl_graph_v1.bin``. Edges go both ways. Nodes are numbered
    by reverse Cuthill-McKee and edges by destination, as in DGL.
    """

    _raw, _saved = ("{}.npz",), "dgl_graph_v1.bin"
    num_classes = 0

    def _from_raw(self, *files: Path) -> Graph:
        """Of CSR matrices as arrays: ``adj``, and ``attr`` and ``labels`` so or as they are."""
        (path,) = files
        arrays = read_npz(path, lambda name: name.split("_")[0] in ("adj", "attr", "labels"))

        def matrix(name: str) -> Any:
            if f"{name}_data" not in arrays:
                return arrays[name if name in arrays else f"{name}_matrix"]
            import scipy.sparse

            parts = tuple(arrays[f"{name}_{part}"] for part in ("data", "indices", "indptr"))
            stored = scipy.sparse.csr_matrix(parts, shape=tuple(arrays[f"{name}_shape"]))
            stored.check_format(full_check=True)
            return stored

        try:
            ends = matrix("adj").tocoo()
            rows, labels = matrix("attr"), matrix("labels")
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise GraphValueError(
                f"{path} does not hold such a graph ({error}); get it again"
            ) from None
        rows, labels = (x if isinstance(x, np.ndarray) else x.toarray() for x in (rows, labels))
        g = to_bidirected(graph(_ids(ends.row, ends.col), num_nodes=len(rows)))
        g.ndata["feat"] = torch.from_numpy(rows.astype(np.float32))
        g.ndata["label"] = torch.from_numpy(labels.astype(np.int64))
        return by_destination(g)


class CoraFullDataset(GNNBenchmarkDataset):
    """19,793 papers of 70 fields."""

    _title, num_classes = "cora_full", 70


class CoauthorCSDataset(GNNBenchmarkDataset):
    """18,333 authors of 15 fields of computer science."""

    _title, num_classes = "coauthor_cs", 15


class CoauthorPhysicsDataset(GNNBenchmarkDataset):
    """34,493 authors of 5 fields of physics."""

    _title, num_classes = "coauthor_physics", 5


class AmazonCoBuyComputerDataset(GNNBenchmarkDataset):
    """13,752 computers of 10 kinds, joined where people bought both."""

    _title, num_classes = "amazon_co_buy_computer", 10


class AmazonCoBuyPhotoDataset(GNNBenchmarkDataset):
    """7,650 cameras of 8 kinds, joined where people bought both."""

    _title, num_classes = "amazon_co_buy_photo", 8


class WikiCSDataset(RawOrSavedDataset):
    """11,701 articles on computer science of 10 branches, with 20 training sets.

    Source: Mernyei and Cangea, "Wiki-CS: A Wikipedia-Based Benchmark for Graph Neural Networks",
    2020, https://arxiv.org/abs/2007.02901. Read is ``data.json``, or DGL's ``dgl_graph.bin``.
    ``train_mask``, ``val_mask`` and ``stopping_mask`` are ``[num_nodes, 20]``.
    """

    _title, _raw, num_classes = "wiki_cs", ("data.json",), 10

    def _from_raw(self, *files: Path) -> Graph:
        stored = read_json_regular(files[0])
        links = [(node, other) for node, others in enumerate(stored["links"]) for other in others]
        src, dst = torch.tensor(links, dtype=torch.int64).reshape(-1, 2).T
        g = to_bidirected(graph((src, dst), num_nodes=len(stored["labels"])))
        g.ndata["feat"] = torch.tensor(stored["features"], dtype=torch.float32)
        g.ndata["label"] = torch.tensor(stored["labels"], dtype=torch.int64)
        for name in ("train_mask", "val_mask", "stopping_mask"):
            g.ndata[name] = torch.tensor(stored[f"{name}s"]).bool().T.contiguous()
        g.ndata["test_mask"] = torch.tensor(stored["test_mask"]).bool()
        return by_destination(g)


class GraphSAINTDataset(RawOrSavedDataset):
    """Base of Flickr and Yelp of "GraphSAINT: Graph Sampling Based Inductive Learning Method".

    Source: Zeng et al., ICLR 2020, https://arxiv.org/abs/1907.04931. Read are ``adj_full.npz``,
    ``feats.npy``, ``class_map.json`` and ``role.json``, or DGL's ``dgl_graph.bin``.
    """

    _raw = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")
    num_classes = 0

    def __init__(
        self,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: Callable[[Graph], Any] | None = None,
        reorder: bool = False,
    ) -> None:
        self._reorder = reorder
        super().__init__(raw_dir, force_reload, verbose, transform)

    def _from_raw(self, *files: Path) -> Graph:
        import scipy.sparse

        g = from_scipy(scipy.sparse.load_npz(files[0]))
        g.ndata["feat"] = torch.from_numpy(np.load(files[1], allow_pickle=False)).float()
        classes, roles = (read_json_regular(file) for file in files[2:])
        row_shape = torch.as_tensor(next(iter(classes.values()), 0)).shape
        labels = torch.full((g.num_nodes(), *row_shape), -1, dtype=torch.int64)
        for node, label in classes.items():
            labels[int(node)] = torch.as_tensor(label)
        g.ndata["label"] = labels
        for role, mask in zip(("tr", "va", "te"), MASKS, strict=True):
            _set_mask(g, mask, torch.tensor(roles[role], dtype=torch.int64))
        return by_destination(g) if self._reorder else g


def _set_mask(g: Graph, name: str, ids: Tensor) -> None:
    g.ndata[name] = torch.zeros(g.num_nodes(), dtype=torch.bool)
    g.ndata[name][ids] = True


class FlickrDataset(GraphSAINTDataset):
    """89,250 pictures of 7 kinds."""

    _title, num_classes = "flickr", 7


class YelpDataset(GraphSAINTDataset):
    """716,847 users, each with several of 100 classes."""

    _title, num_classes = "yelp", 100


class FraudDataset(OneGraphDataset):
    """Reviews or users, joined in three ways; some are fraudulent.

    Source: Dou et al., "Enhancing Graph Neural Network-based Fraud Detectors against Camouflaged
    Fraudsters", CIKM 2020, https://arxiv.org/abs/2008.08692. Read is ``YelpChi.mat`` or
    ``Amazon.mat``; ``random_seed`` decides the sets.
    """

    file_urls: ClassVar[dict[str, str]] = {
        "yelp": "dataset/FraudYelp.zip",
        "amazon": "dataset/FraudAmazon.zip",
    }
    relations: ClassVar[dict[str, list[str]]] = {
        "yelp": ["net_rsr", "net_rtr", "net_rur"],
        "amazon": ["net_upu", "net_usu", "net_uvu"],
    }
    file_names: ClassVar[dict[str, str]] = {"yelp": "YelpChi.mat", "amazon": "Amazon.mat"}
    node_name: ClassVar[dict[str, str]] = {"yelp": "review", "amazon": "user"}
    num_classes = 2

    def __init__(
        self,
        name: str,
        raw_dir: str | os.PathLike[str] | None = None,
        random_seed: int = 717,
        train_size: float = 0.7,
        val_size: float = 0.1,
        force_reload: bool = False,
        verbose: bool = True,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        if name not in self.file_names:
            raise GraphValueError(f"name must be one of {list(self.file_names)} (got {name!r})")
        if not 0 <= train_size + val_size <= 1:
            raise GraphValueError(
                f"train_size and val_size must be together at most 1 (got {train_size} and "
                f"{val_size})"
            )
        self.seed, self.train_size, self.val_size = random_seed, train_size, val_size
        hash_key = (random_seed, train_size, val_size)
        url = get_dgl_url(self.file_urls[name])
        super().__init__(name, url, raw_dir, hash_key, force_reload, verbose, transform)

    def process(self) -> None:
        from scipy.io import loadmat

        file, ntype = self.file_names[self.name], self.node_name[self.name]
        stored = loadmat(self._folder_with([file]) / file)
        ends = {relation: stored[relation].tocoo() for relation in self.relations[self.name]}
        edges = {(ntype, name, ntype): _ids(m.row, m.col) for name, m in ends.items()}
        g = heterograph(edges, num_nodes_dict={ntype: stored["features"].shape[0]})
        g.ndata["feature"] = torch.from_numpy(stored["features"].toarray().astype(np.float32))
        g.ndata["label"] = torch.from_numpy(stored["label"].squeeze().astype(np.int64))
        self.graph = self._g = g
        # the first users of Amazon have no labels
        nodes = np.arange(3305 if self.name == "amazon" else 0, g.num_nodes())
        nodes = np.random.RandomState(self.seed).permutation(nodes)
        num_train, num_val = (int(s * len(nodes)) for s in (self.train_size, self.val_size))
        sets = np.split(nodes, [num_train, len(nodes) - num_val])
        for mask, ids in zip(("train_mask", "test_mask", "val_mask"), sets, strict=True):
            _set_mask(g, mask, torch.from_numpy(ids))


class FraudYelpDataset(FraudDataset):
    """`FraudDataset` of 45,954 reviews."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("yelp", *args, **kwargs)


class FraudAmazonDataset(FraudDataset):
    """`FraudDataset` of 11,944 users."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("amazon", *args, **kwargs)


class KnowledgeGraphDataset(OneGraphDataset):
    """Base of data sets of triples (head, relation, tail), parted to find some again.

    Read are ``entities.dict``, ``relations.dict``, ``train.txt``, ``valid.txt`` and ``test.txt``.
    Edge fields are ``etype``, and ``train_mask``, ``val_mask``, ``test_mask``, which reversed edges
    have too where ``train_edge_mask``, ``valid_edge_mask`` and ``test_edge_mask`` leave them out.
    """

    _title = ""
    num_nodes = 0
    num_rels = 0

    def __init__(
        self,
        reverse: bool = True,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = True,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        self.reverse = reverse
        url = get_dgl_url(f"dataset/{self._title}.tgz")
        super().__init__(self._title, url, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        files = ["entities.dict", "relations.dict", "train.txt", "valid.txt", "test.txt"]
        folder = self._folder_with(files)
        entities, relations = (_numbers(folder / file) for file in files[:2])
        self.num_nodes, self.num_rels = len(entities), len(relations)
        sets = [_triples(folder / file, entities, relations) for file in files[2:]]
        self._train, self._valid, self._test = (part.numpy() for part in sets)
        self._say(f"# entities: {self.num_nodes}\n# relations: {self.num_rels}")
        for name, part in zip(("training", "validation", "testing"), sets, strict=True):
            self._say(f"# {name} edges: {len(part)}")
        self._g = _knowledge_graph(self.num_nodes, self.num_rels, sets, self.reverse)


class FB15k237Dataset(KnowledgeGraphDataset):
    """14,541 entities of Freebase, 237 relations, 310,116 triples."""

    _title = "FB15k-237"


class FB15kDataset(KnowledgeGraphDataset):
    """14,951 entities of Freebase, 1,345 relations, 592,213 triples."""

    _title = "FB15k"


class WN18Dataset(KnowledgeGraphDataset):
    """40,943 words of WordNet, 18 relations, 151,442 triples."""

    _title = "wn18"


def load_knowledge_graph(dataset: str) -> KnowledgeGraphDataset:
    """The data set ``"wn18"``, ``"FB15k"`` or ``"FB15k-237"``."""
    kinds = {kind._title: kind for kind in (WN18Dataset, FB15kDataset, FB15k237Dataset)}
    if dataset not in kinds:
        raise GraphValueError(f"dataset must be wn18, FB15k or FB15k-237 (got {dataset!r})")
    return kinds[dataset]()


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split("\t") for line in read_text_regular(path).splitlines() if line.strip())
    return {name.strip(): int(number) for number, name in lines}


def _triples(path: Path, entities: dict[str, int], relations: dict[str, int]) -> Tensor:
    """``[num_triples, 3]``."""
    lines = [line.strip().split("\t") for line in read_text_regular(path).splitlines()]
    try:
        triples = [(entities[s], relations[r], entities[o]) for s, r, o in filter(any, lines)]
    except (KeyError, ValueError) as error:
        raise GraphValueError(f"{path} has a triple that cannot be read ({error})") from None
    return torch.tensor(triples, dtype=torch.int64).reshape(-1, 3)


def _knowledge_graph(num_nodes: int, num_rels: int, sets: list[Tensor], reverse: bool) -> Graph:
    """Edges in the order of DGL: by relation, in the order of their first triples."""
    src, rel, dst = torch.cat(sets).T
    member = torch.cat([torch.full((len(part),), i) for i, part in enumerate(sets, 1)])
    first = torch.full((num_rels,), len(rel)).scatter_reduce(0, rel, torch.arange(len(rel)), "amin")
    order = first[rel].argsort(stable=True)
    src, rel, dst, member = src[order], rel[order], dst[order], member[order]
    both = member
    if reverse:
        src, dst = torch.cat([src, dst]), torch.cat([dst, src])
        rel, both = torch.cat([rel, rel + num_rels]), member.repeat(2)
        member = torch.cat([member, torch.zeros_like(member)])
    g = graph((src, dst), num_nodes=num_nodes)
    names = (("train", "train"), ("valid", "val"), ("test", "test"))
    for number, (own, of_both) in enumerate(names, 1):
        g.edata[f"{own}_edge_mask"] = member == number
        g.edata[f"{of_both}_mask"] = both == number
    g.edata["etype"] = rel
    g.ndata["ntype"] = torch.zeros(num_nodes, dtype=torch.int64)
    return g


CoraFull = CoraFullDataset
