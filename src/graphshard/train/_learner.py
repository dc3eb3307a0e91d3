# SPDX-License-Identifier: Apache-2.0
"""Learner: what a run changes: model, embeddings, optimizer, random numbers; every rank has one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._base.typing import CanonicalEType
from ..comm import anchor, gather_grads, is_initialized, rank, sync_params
from ..comm.collectives import raise_everywhere, reduce_ints
from ..errors import ModelError
from ..fullbatch import GraphShardManager, PartitionData
from ..graph import MessagePassingGraph
from ..ops import BlockwiseRows
from ..partition.format import etype_key
from ._categories import CategoryTables, SparseFeatures
from ._checkpoint import tensors_under
from ._config import ResolvedConfig
from ._defaults import num_negatives
from ._edges import EdgeNetwork, EndRows, PairPredictor, TargetEdges
from ._embeddings import NodeEmbeddings, OneHotRelGraphConv, Table, pair_data
from ._links import LinkPredictor, LinkScorer
from ._models import (
    GAT,
    GCN,
    HGT,
    RGCN,
    SAGE,
    GATv2,
    InputDropout,
    ModelFeatures,
    NodeClassifier,
    TypedNetwork,
    TypedRGCN,
)
from ._optimizer import Descent
from ._own_model import ModelSchema, build_own_model, check_rows
from ._row_files import row_folders, rows_with_dtype
from ._tasks import Classes, Links, gather_rows, widened
from ._training_shard import TrainingShard, all_finite, edge_columns

# Tables of an R-GCN whose nodes have no features.
ROWS, SELF_ROWS = "one-hot rows", "one-hot rows of self loops"

GPU_RANDOM = "random on the GPU"
"""Name, in a rank's state, of the generator of its GPU."""


class Learner:
    """A model with its embeddings and its optimizer, for this rank's part of a graph.

    Some of it every rank holds alike (the model and its Adam moments), some each rank holds for
    itself (embeddings of its nodes, their Adam moments, its dropout generator). Both come out as
    flat dictionaries of tensors, and go back in from them, bit for bit.

    Weights and embeddings are drawn on the CPU, the same for every device, and then moved.
    """

    def __init__(self, shard: TrainingShard, config: ResolvedConfig) -> None:
        self._host, self._shard, self._config = shard, shard.on_device(), config
        self.device = shard.device
        torch.manual_seed(config.seed)
        #: What gives rows to nodes: the model, or the part of it before a predictor.
        self.network = build_model(shard, config)
        if shard.category_counts or shard.sparse_counts:
            counts_of_types = shard.category_counts, shard.sparse_counts
            self.network.category_tables = CategoryTables(*counts_of_types)
        if counts := edge_category_counts(shard, config.model):
            self.network.edge_category_tables = CategoryTables(counts)
        self._category_tables, self._edge_tables = (
            getattr(self.network, name, None)
            for name in ("category_tables", "edge_category_tables")
        )
        self.model: nn.Module = self.network
        if shard.edges is not None:
            self.model = edge_network(self.network, shard, config)
        self.model.to(config.torch_dtype)
        for module in self.model.modules():
            if isinstance(module, InputDropout) and shard.target in self._shard.features:
                module.mark_constant(self._shard.features[shard.target])
        width = self.exchanged_width()
        self.graph = self._shard.graph(config, width)
        self.graphs: list[GraphShardManager] = [self.graph] * config.layers
        tables = {
            t: Table(shard.original_ids[t], shard.num_all[t], self.table_width)
            for t in shard.data.node_type_names
            if t not in shard.feature_widths
        }
        first = self.network.one_hot if isinstance(self.network, RGCN) else None
        #: The graph of the first layer, where its sources are pairs of a node and a relation.
        self.pairs: PartitionData | None = None
        if first is not None:
            tables, self.pairs = one_hot_tables(shard, first)
            if self.pairs is not None:
                pairs = self.pairs.to(self.device, feature_device="cpu")
                self.graphs[0] = self._shard.graph(config, width, pairs)
        self.embeddings = NodeEmbeddings(tables, config.seed, config.torch_dtype)
        self.model.to(self.device)
        self.embeddings.to(self.device)
        if is_initialized():
            sync_params(self.model)
        self._named = {
            **{f"model/{name}": p for name, p in self.model.named_parameters()},
            **{f"embeddings/{name}": p for name, p in self.embeddings.named_parameters()},
        }
        chosen = {id(p) for p in [*self._penalized_parameters(), *self.embeddings.rows]}
        penalized = [p for p in self._named.values() if id(p) in chosen]
        others = [p for p in self._named.values() if id(p) not in chosen]
        self.descent = Descent(config, penalized, others, owned=self.embeddings.rows)
        self.optimizer = self.descent.optimizer
        self._ends: dict[str | None, EndRows] = {}
        #: Losses and ranks of link prediction; None of other tasks.
        self.links: LinkScorer | None = None
        if self._shard.links is not None:
            self.links = link_scorer(self._shard, self.model, config)
        #: Factor of the loss of each class, or None.
        self.class_weights = class_weights(shard, config)
        in_files = shard.data.in_files
        self._stored = {
            ntype: in_files[f"{ntype}/feat"].as_dtype(config.torch_dtype)
            for ntype in shard.features
            if f"{ntype}/feat" in in_files
        }
        self._mapped: dict[str, Tensor] = {}
        #: The best model and embeddings so far, of which `keep` makes copies.
        self.best: tuple[dict[str, Tensor], ...] | None = None
        #: What gives rows in evaluations, in the place of `node_rows`; or None.
        self.evaluates: Callable[[], Any] | None = None
        torch.manual_seed(dropout_seed(config.seed, rank()))

    @property
    def table_width(self) -> int:
        """Width of rows that are learnt for nodes without features."""
        return int(getattr(self.network, "table_width", self._config.hidden))

    def exchanged_width(self) -> int:
        """A bound on the columns of the rows that ranks exchange; of an own model, a guess."""
        own = getattr(self.network, "exchanged_width", None)
        if own is not None:
            return int(own())
        return max(self._config.hidden, *self._shard.feature_widths.values(), 1)

    def _penalized_parameters(self) -> list[nn.Parameter]:
        own = getattr(self.network, "penalized_parameters", None)
        return list(self.network.parameters() if own is None else own())

    def host_graph(self) -> GraphShardManager:
        """The graph on the CPU, as samplers want it; collective."""
        if self.device.type == "cpu":
            return self.graph
        return self._host.graph(self._config, self.exchanged_width())

    def scores(self) -> Tensor:
        """Scores of this rank's rows, nodes of the target type or edges; collective."""
        return self._scores_of(self.exact_rows())

    def _scores_of(self, rows: Any) -> Tensor:
        return rows if self._shard.edges is None else self._edge_scores(rows, None)

    def node_rows(self) -> Any:
        """The model's output for this rank's nodes, of several types by type; collective."""
        shard = self._shard
        features: dict[str, Any] = dict(shard.features)
        features |= {t: self._rows_in_file(t) for t in features if t in self._stored}
        rows = self.input_rows(features, shard.categories, shard.sparse)
        rows |= self.embeddings()
        self.set_edge_features(self.graphs, self._shard.edge_features, self._shard.edge_categories)
        return self.apply(self.graphs, model_features(self._shard, rows))

    def _rows_in_file(self, ntype: str) -> Any:
        """Features of a type that stay in a file, as the network reads them."""
        if isinstance(self.network, NodeClassifier) and not (
            isinstance(self.network, RGCN)  # messages read rows as they are
        ):
            return BlockwiseRows(self._stored[ntype], self.device)
        if ntype not in self._mapped:
            rows = rows_with_dtype(self._stored[ntype], row_folders(self._config))
            # A model of the user's own may write to its input.
            mapped = rows.mapped(is_private=":" in self._config.model).to(self.device)
            self.graph.mark_constant(mapped)
            self._mapped[ntype] = mapped
        return self._mapped[ntype]

    def input_rows(
        self,
        features: Mapping[str, Tensor],
        categories: Mapping[str, Tensor],
        sparse: Mapping[str, SparseFeatures],
    ) -> dict[str, Tensor]:
        """What a network is given of nodes that have features or categories, by node type."""
        tables = self._category_tables
        return dict(features) if tables is None else tables(features, categories, sparse)

    def set_edge_features(
        self,
        graphs: Sequence[MessagePassingGraph],
        features: Mapping[CanonicalEType, Tensor],
        categories: Mapping[CanonicalEType, Tensor],
    ) -> None:
        """Put on the edges of graphs what a network is given of relations with categories."""
        if self._edge_tables is None or "feat" not in edge_columns(self._config.model):
            return
        names = {etype_key(etype): etype for etype in categories}
        rows = self._edge_tables(
            {etype_key(etype): feat for etype, feat in features.items()},
            {name: categories[etype] for name, etype in names.items()},
        )
        for name, etype in names.items():
            for graph in {id(graph): graph for graph in graphs}.values():
                graph.edges[etype].data["feat"] = rows[name]

    def edge_scores_in_pieces(self, size: int) -> Iterator[Tensor]:
        """The scores of this rank's edges, at most so many at a time; every step is collective."""
        edges, rows = self._shard.edges, self.exact_rows()
        assert edges is not None
        ranges = {t: self._shard.data.node_map(t) for t in self._shard.data.node_type_names}
        for start in range(0, max(1, *reduce_ints([len(edges)], "max")), size):
            places = torch.arange(min(start, len(edges)), min(start + size, len(edges)))
            some = edges.at(places.to(self.device))
            yield self.score(*EndRows(some, ranges)(rows), some)

    def _edge_scores(self, rows: Mapping[str, Tensor], split: str | None) -> Tensor:
        """Scores of this rank's edges, or of a split's; collective."""
        edges = self._shard.edges
        assert edges is not None
        if split is not None:
            edges = edges.at(self._shard.rows[split])
        if split not in self._ends:
            ranges = {t: self._shard.data.node_map(t) for t in self._shard.data.node_type_names}
            self._ends[split] = EndRows(edges, ranges)
        return self.score(*self._ends[split](rows), edges)

    def score(self, sources: Tensor, destinations: Tensor, edges: TargetEdges) -> Tensor:
        """Scores of edges from the rows of their ends, in the precision that is configured."""
        columns = [] if edges.feat is None else [edges.feat]
        if edges.categories is not None:
            columns += self._rows_of_categories(edges, edges.categories)
        feat = torch.cat(columns, dim=1) if columns else None
        with self.autocast():
            assert isinstance(self.model, EdgeNetwork)
            scores: Tensor = self.model.predictor(sources, destinations, feat)
        return scores

    def _rows_of_categories(self, edges: TargetEdges, categories: Tensor) -> list[Tensor]:
        """Learnt rows of each relation that has categories, zeros for edges of others."""
        assert self._edge_tables is not None
        columns, first = [], 0
        for number, etype in enumerate(edges.relations):
            key = etype_key(etype)
            last = first + len(self._shard.edge_category_counts.get(key, ()))
            if last > first:
                rows = self._edge_tables.rows_of(key, categories[:, first:last])
                columns.append(torch.where((edges.number == number).unsqueeze(1), rows, 0))
            first = last
        return columns

    def autocast(self) -> torch.autocast:
        """The precision that is configured."""
        is_enabled = self._config.autocast
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_enabled)

    def apply(self, graphs: Sequence[MessagePassingGraph], features: ModelFeatures) -> Any:
        """The model's output, in the precision that is configured; collective."""
        with self.autocast():
            rows = self.model(graphs, features)
        if ":" in self._config.model:
            targets = self._shard.targets
            if self._shard.edges is not None and isinstance(targets, str):
                targets = (targets,)  # `EdgeNetwork` gives rows by type
            width = self._shard.out_width(self._config)
            check_rows(self._config.model, rows, graphs, targets, width)
        return rows

    def training_loss(self, epoch: int) -> Tensor:
        """This rank's share of the mean loss over the training rows of all ranks; collective."""
        rows = self.node_rows()
        if self.links is not None:
            return self.links.loss(rows, "train", epoch) / self._shard.num_nodes["train"]
        if self._shard.edges is None:
            return self.loss(rows, "train")
        scores = self._edge_scores(rows, "train")
        labels = self._shard.label[self._shard.rows["train"]]
        total = self._shard.task.loss(scores, labels, self.class_weights)
        return anchor(total / self._shard.num_nodes["train"], scores)

    def loss(self, scores: Tensor, split: str) -> Tensor:
        """This rank's share of the mean loss over a split's rows on all ranks.

        Class weights are for training.
        """
        rows = self._shard.rows[split]
        weights = self.class_weights if self.model.training else None
        total = self._shard.task.loss(scores[rows], self._shard.label[rows], weights)
        return total / self._shard.num_nodes[split]

    def descend(self, loss: Tensor, when: str) -> float:
        """Step down the sum of all ranks' losses; returns this rank's. Collective.

        ``when`` names the step in errors: "epoch 3".

        Raises:
            FloatingPointError: On every rank, before the step, if the loss or a gradient of any
                rank is not finite; says which rank's, and what of it.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if not loss.requires_grad:
            raise ModelError(
                f"the rows of model {self._config.model} must depend on its parameters (got a loss "
                "without a gradient); look for detach(), no_grad() and NumPy in forward"
            )
        loss.backward()
        value = float(loss.detach())
        gradients = {n: p.grad for n, p in self._named.items() if p.grad is not None}
        is_finite = math.isfinite(value) and all_finite(gradients.values())
        if reduce_ints([not is_finite], "max")[0]:
            self.raise_not_finite(f"the training loss of {when}", value, gradients)
        if is_initialized():
            gather_grads(self.model)
        for parameter in self._named.values():
            # Weight decay falls alike on what has no gradient, and on what has one of zeros because
            # other ranks asked for rows.
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.descent.step()
        return value

    def raise_not_finite(
        self, what: str, value: float, gradients: Mapping[str, Tensor] | None = None
    ) -> None:
        """Stop all ranks, because a number of one is not finite: the origin is told. Collective.

        What one rank has in its rows reaches others with the messages, so the rank that speaks is
        one at which the error can have begun: features come before embeddings, these before what
        all ranks hold alike, and that before what follows from it.
        """
        text, order = describe_not_finite(
            {
                # Those in files were looked at when they were read.
                "features": {
                    t: x for t, x in self._shard.features.items() if t not in self._stored
                },
                "embeddings": tensors_under(self._named, "embeddings/"),
                "parameters": tensors_under(self._named, "model/"),
                "gradients": gradients or {},
            }
        )
        if order == 0 and math.isfinite(value):
            order = -1  # another rank's number
        error = None
        if order == reduce_ints([order], "max")[0]:
            cure = f"lower lr (got {self._config.lr:g})"
            if self._config.dtype == "bfloat16":
                cure += ", or compute in float32"
            error = FloatingPointError(
                f"{what} is not finite (got {value:g} for part {self._shard.data.rank}): {text}; "
                + ("mend them and partition again" if text.startswith("features '") else cure)
            )
        raise_everywhere(error)

    def exact_rows(self) -> Any:
        """What `node_rows` gives, by what evaluations are computed by; collective."""
        return self.node_rows() if self.evaluates is None else self.evaluates()

    @torch.no_grad()
    def evaluation_scores(self) -> Any:
        """The scores of all rows without dropout, or for links rows of nodes; collective."""
        self.model.eval()
        rows = self.exact_rows()
        return rows if self.links is not None else self._scores_of(rows)

    @torch.no_grad()
    def numbers(self, scores: Any, split: str) -> list[float]:
        """Of a split, what its metrics are summed from, and this rank's share of the loss.

        Collective for links.
        """
        if self.links is not None:
            share = self.links.loss(scores, split, -1) / self._shard.num_nodes[split]
            return [*self.links.numbers(scores, split), float(share)]
        rows = self._shard.rows[split]
        sums = self._shard.task.summands(scores[rows], self._shard.label[rows])
        return [*sums, float(self.loss(scores, split))]

    def gathered(self, scores: Tensor, split: str) -> tuple[Tensor, Tensor]:
        """Scores and labels of a split's rows of all ranks, on the CPU; collective."""
        rows = self._shard.rows[split]
        return (
            gather_rows(widened(scores[rows]).detach().cpu()),
            gather_rows(self._shard.label[rows].cpu()),
        )

    def keep(self) -> None:
        """Remember a copy of the model and the embeddings, on the CPU, as the best so far."""
        self.best = tuple(
            {k: v.detach().to("cpu", copy=True) for k, v in module.state_dict().items()}
            for module in (self.model, self.embeddings)
        )

    def shared_state(self) -> dict[str, Tensor]:
        """What all ranks hold alike: ``model/...``, ``optimizer/model/...``, ``best/...``."""
        return self._state_of(0, self.model, "model/")

    def local_state(self) -> dict[str, Tensor]:
        """What this rank alone holds: embeddings, their moments, the random number generators."""
        state = self._state_of(1, self.embeddings, "embeddings/")
        state["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state[GPU_RANDOM] = torch.cuda.get_rng_state(self.device)
        return state

    def _state_of(self, place: int, module: nn.Module, prefix: str) -> dict[str, Tensor]:
        best = {} if self.best is None else self.best[place]
        moments = {
            f"optimizer/{name}/{key}": value
            for name, parameter in self._named.items()
            if name.startswith(prefix)
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        state = {
            **{f"{prefix}{k}": v for k, v in module.state_dict().items()},
            **moments,
            **{f"best/{k}": v for k, v in best.items()},
        }
        return {name: value.cpu() for name, value in state.items()}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Take back what `shared_state` and `local_state` gave; nothing changes on an error.

        It may have been on another device. Where there is no state of a GPU's generator, that of
        this rank is seeded from the CPU's.

        Raises:
            ValueError: A tensor is missing, is unknown, or has another shape or dtype.
        """
        is_evaluated = any(name.startswith("best/") for name in shared)
        on_gpu = self.device.type == "cuda"
        for loaded, module, prefix in (
            (shared, self.model, "model/"),
            (local, self.embeddings, "embeddings/"),
        ):
            state = module.state_dict()
            like = {f"{prefix}{k}": v for k, v in state.items()}
            if module is self.embeddings:
                like["random"] = torch.get_rng_state()
                if GPU_RANDOM in loaded:
                    like[GPU_RANDOM] = loaded[GPU_RANDOM]
                    if on_gpu:
                        like[GPU_RANDOM] = torch.cuda.get_rng_state(self.device)
            if is_evaluated:
                like |= {f"best/{k}": v for k, v in state.items()}
            _check_tensors(loaded, {**like, **self._optimizer_shapes(loaded, prefix)})
        self.model.load_state_dict(tensors_under(shared, "model/"))
        self.embeddings.load_state_dict(tensors_under(local, "embeddings/"))
        self.optimizer.state.clear()
        for name, value in tensors_under({**shared, **local}, "optimizer/").items():
            of_parameter, _, key = name.rpartition("/")
            parameter = self._named[of_parameter]
            # Adam counts its steps on the CPU, wherever the parameters are.
            device = torch.device("cpu") if key == "step" else parameter.device
            self.optimizer.state[parameter][key] = value.to(device, copy=True)
        torch.set_rng_state(local["random"].clone())
        if on_gpu and GPU_RANDOM in local:
            torch.cuda.set_rng_state(local[GPU_RANDOM].clone(), self.device)
        elif on_gpu:
            torch.cuda.manual_seed(_drawn_seed(local["random"]))
        self.best = None
        if is_evaluated:
            bests = (tensors_under(tensors, "best/") for tensors in (shared, local))
            self.best = tuple({k: v.clone() for k, v in best.items()} for best in bests)

    def _optimizer_shapes(self, loaded: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Tensors like the moments there must be for those parameters that have any."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            keys = [f"optimizer/{name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")]
            if name.startswith(prefix) and any(key in loaded for key in keys):
                moments |= dict(zip(keys, (torch.empty(()), parameter, parameter), strict=True))
        return moments


def _drawn_seed(state: Tensor) -> int:
    """A seed that a generator of the CPU in this state would draw."""
    generator = torch.Generator()
    generator.set_state(state.clone())
    return int(torch.randint(2**63 - 1, (), generator=generator))


def _check_tensors(loaded: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    for name in dict.fromkeys([*like, *loaded]):
        if name not in loaded:
            raise ValueError(f"tensor '{name}' is missing")
        if name not in like:
            raise ValueError(f"the model has no '{name}'")
        mine, theirs = like[name], loaded[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise ValueError(
                f"'{name}' must be {mine.dtype} {list(mine.shape)} (got {theirs.dtype} "
                f"{list(theirs.shape)})"
            )


def model_features(shard: TrainingShard, rows: Mapping[str, Tensor]) -> ModelFeatures:
    """What a model takes as features, from the rows of each node type or table."""
    if shard.is_typed:
        return rows
    return (rows[ROWS], rows[SELF_ROWS]) if SELF_ROWS in rows else rows[shard.target]


def class_weights(shard: TrainingShard, config: ResolvedConfig) -> Tensor | None:
    """Weight of each class, in the mean 1 over training nodes: float64, on all ranks. Collective.

    Sums of weighted losses over the number of nodes are then torch's weighted means. Balanced, a
    class weighs 1 over its number of training nodes.

    Raises:
        ValueError: Weights were given that are not of the classes.
    """
    given = config.class_weights
    if given is None:
        return None
    if not isinstance(shard.task, Classes):
        raise ValueError(
            f"class_weights are for one class of several (got {shard.task_info.kind}); leave them "
            "out"
        )
    labels = shard.label[shard.rows["train"]].cpu()
    counts = reduce_ints(torch.bincount(labels, minlength=shard.num_classes).tolist())
    numbers = torch.tensor(counts, dtype=torch.float64)
    if isinstance(given, str):
        weights = torch.where(numbers > 0, numbers.clamp(min=1).reciprocal(), 0.0)
    else:
        names = shard.class_names or tuple(map(str, range(shard.num_classes)))
        different = sorted({*given} ^ {*names})
        if different:
            few = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise ValueError(
                f"class_weights must have a weight for each class, {few} ("
                + (
                    f"got {different[0]!r}, which is none)"
                    if different[0] in given
                    else f"got none for {different[0]!r})"
                )
            )
        weights = torch.tensor([float(given[name]) for name in names], dtype=torch.float64)
    total = float((weights * numbers).sum())
    if total == 0:
        raise ValueError("class_weights must not be 0 for all classes of training nodes")
    return weights * (numbers.sum() / total)


def build_model(shard: TrainingShard, config: ResolvedConfig) -> nn.Module:
    """The configured model for a graph, with weights from torch's default generator."""
    hidden, layers, heads = config.hidden, config.layers, config.heads
    classes, dropout, name = shard.out_width(config), config.dropout, config.model
    widths = shard.feature_widths
    edge_feats = shard.edge_feature_widths
    if ":" in name:
        arguments = {"hidden": hidden, "layers": layers, "dropout": dropout, "out": classes}
        return build_own_model(
            name, model_schema(shard, name, hidden), arguments | dict(config.model_args or {})
        )
    types = shard.data.canonical_etypes, shard.data.node_type_names, shard.targets
    if name == "hgt":
        return HGT(widths, *types, hidden, classes, layers, heads, dropout)
    if shard.is_typed and name == "rgcn":
        return TypedRGCN(widths, *types, hidden, classes, layers, config.num_bases, dropout)
    if shard.is_typed:
        how = config.aggregator
        network = TypedNetwork(
            name, widths, *types, hidden, classes, layers, heads, dropout, how, edge_feats
        )
        network.encodes = config.encoder
        if config.norm:
            network.add_norms()
        return network
    in_feats = widths.get(shard.target)
    if name == "rgcn":
        if shard.links is not None and in_feats is None:
            in_feats = hidden  # of rows that are learnt, the same for all relations
        rgcn = RGCN(
            in_feats, hidden, classes, shard.num_relations, layers, config.num_bases, dropout
        )
        if shard.links is not None:
            rgcn.start_with_own_rows()
        return rgcn
    width = in_width = hidden if in_feats is None else in_feats
    if config.encoder:
        width = hidden * heads if name in ("gat", "gatv2") else hidden
    model: NodeClassifier
    if name in ("gat", "gatv2"):
        kind = GAT if name == "gat" else GATv2
        of_edges = next(iter(edge_feats.values()), 0)
        model = kind(width, hidden, classes, layers, heads, dropout, of_edges)
    elif name == "gcn":
        is_product = (  # of nothing but sparse features
            shard.target in shard.sparse_counts
            and shard.target not in {*shard.features, *shard.category_counts}
        )
        first_weight = not is_product or config.encoder or layers == 1 or width != hidden
        model = GCN(width, hidden, classes, layers, dropout, first_weight)
    else:
        model = SAGE(width, hidden, classes, layers, dropout, config.aggregator)
    if config.encoder:
        model.add_encoder(in_width)
    model.add_own_rows_and_norms(config.residual, config.norm)
    return model


def model_schema(shard: TrainingShard, name: str, hidden: int) -> ModelSchema:
    """What a model of the user's own is told about a graph."""
    names = shard.data.node_type_names
    return ModelSchema(
        node_types=names,
        canonical_etypes=shard.data.canonical_etypes,
        target=shard.targets,
        node_widths={ntype: shard.feature_widths.get(ntype, hidden) for ntype in names},
        edge_widths={
            etype: {
                column: shard.edge_feature_widths[etype] if column == "feat" else 1
                for column in ("weight", "feat")
                if column in rows or (column == "feat" and "categories" in rows)
            }
            for etype, rows in shard.edge_rows(name).items()
        },
        num_relations=shard.num_relations,
    )


def edge_network(network: nn.Module, shard: TrainingShard, config: ResolvedConfig) -> EdgeNetwork:
    """A network with what scores edges, with weights from torch's default generator."""
    assert shard.edges is not None
    width, ntypes = shard.out_width(config), shard.edges.node_types
    if isinstance(shard.task, Links):
        has_factors = config.predictor == "distmult" or (
            config.predictor is None
            and (shard.relation is not None or len(shard.edges.relations) > 1)
        )
        num_factors = shard.task.num_relations if has_factors else None
        return EdgeNetwork(network, LinkPredictor(width, num_factors, config.dropout), ntypes)
    edge_width = sum(shard.edge_feature_widths.get(etype, 0) for etype in shard.edges.relations)
    predictor = PairPredictor(width, edge_width, shard.task.width, config.dropout)
    return EdgeNetwork(network, predictor, ntypes)


def edge_category_counts(shard: TrainingShard, model: str) -> dict[str, tuple[int, ...]]:
    """Relation to the numbers of values of its columns, of relations whose categories are read."""
    read = {etype_key(etype) for etype in shard.edge_categories}
    if "feat" not in edge_columns(model):
        is_scored = shard.edges is not None and not isinstance(shard.task, Links)
        scored = shard.edges.relations if is_scored and shard.edges is not None else ()
        read &= {etype_key(etype) for etype in scored}
    return {key: counts for key, counts in shard.edge_category_counts.items() if key in read}


def link_scorer(shard: TrainingShard, model: nn.Module, config: ResolvedConfig) -> LinkScorer:
    """What losses and ranks of links are computed by; collective."""
    assert isinstance(model, EdgeNetwork)
    assert isinstance(model.predictor, LinkPredictor)
    assert isinstance(shard.task, Links)
    assert shard.edges is not None
    assert shard.links is not None
    return LinkScorer(
        shard.task,
        model.predictor,
        shard.edges,
        shard.rows,
        shard.links,
        shard.data,
        shard.original_ids,
        config.negatives or num_negatives(shard.relation is not None),
        config.seed,
    )


def one_hot_tables(
    shard: TrainingShard, layer: OneHotRelGraphConv
) -> tuple[dict[str, Table], PartitionData | None]:
    """The rows that a first layer for one-hot input takes, and its graph of pairs; collective."""
    ids, height = shard.original_ids[shard.target], shard.num_all[shard.target]
    own = Table(ids, height, layer.out_feat)
    if layer.num_bases:
        return {ROWS: Table(ids, height, layer.in_width), SELF_ROWS: own}, None
    assert shard.relation is not None
    count = shard.num_relations
    data, pairs = pair_data(shard.data, shard.relation[0], count)
    pair_ids = ids[pairs // count] * count + pairs % count
    return {ROWS: Table(pair_ids, height, layer.in_width), SELF_ROWS: own}, data


def dropout_seed(seed: int, *places: int) -> int:
    """A seed for one generator, such as a rank's, unrelated to those of others."""
    name = "/".join(map(str, ("dropout", seed, *places)))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def describe_not_finite(groups: Mapping[str, Mapping[str, Tensor]]) -> tuple[str, int]:
    """What is to be said of the first group that has such a number, and how early that group is.

    Args:
        groups: What the tensors are, "parameters", to the tensors by name; causes first.

    Returns:
        The sentence, and the number of groups from this one on: 0 where all are finite.
    """
    for order, (kind, tensors) in enumerate(groups.items()):
        for name, tensor in tensors.items():
            count = int((~tensor.detach().isfinite()).sum())
            if count:
                return (
                    f"{kind} '{name}' hold {count} of {tensor.numel()} values that are not finite",
                    len(groups) - order,
                )
    largest = max(
        (float(t.detach().abs().max()) for t in groups["parameters"].values() if t.numel()),
        default=0.0,
    )
    return (
        f"features and parameters are finite (the largest parameter is {largest:.3g}), and what "
        "the network makes of them is not",
        0,
    )
