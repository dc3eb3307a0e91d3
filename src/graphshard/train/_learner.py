# SPDX-License-Identifier: Apache-2.0
"""Learner: what a training run changes - model, embeddings, optimizer, random numbers.

Some of it every rank holds alike (the model and its Adam moments), some each rank holds for itself
(embeddings of its nodes, their Adam moments, its dropout generator). Both come out as flat
dictionaries of tensors, and go back in from them, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm import gather_grads, is_initialized, rank, sync_params
from ..comm.collectives import raise_everywhere, reduce_ints
from ..fullbatch import GraphShardManager, PartitionData
from ._checkpoint import tensors_under
from ._config import ResolvedConfig
from ._embeddings import NodeEmbeddings, OneHotRelGraphConv, Table, pair_data
from ._finite import all_finite, describe_not_finite
from ._models import GAT, GCN, RGCN, SAGE, InputDropout, NodeClassifier, TypedRGCN
from ._shard import TrainingShard

# Tables of an R-GCN whose nodes have no features.
ROWS, SELF_ROWS = "one-hot rows", "one-hot rows of self loops"

GPU_RANDOM = "random on the GPU"
"""Name, in a rank's state, of the generator of its GPU."""


class Learner:
    """A model with its embeddings and its optimizer, for this rank's part of a graph.

    Weights and embeddings are drawn on the CPU, the same for every device, and then moved.

    Args:
        shard: The part, on the CPU.
        config: The run.
    """

    def __init__(self, shard: TrainingShard, config: ResolvedConfig) -> None:
        self._host, self._shard, self._config = shard, shard.on_device(), config
        self.device = shard.device
        torch.manual_seed(config.seed)
        self.model = build_model(shard, config).to(config.torch_dtype)
        for module in self.model.modules():
            if isinstance(module, InputDropout) and shard.target in self._shard.features:
                module.mark_constant(self._shard.features[shard.target])
        width = self.model.exchanged_width()
        self.graph = self._shard.graph(config, width)
        self.graphs: list[Any] = [self.graph] * config.layers
        tables = {
            t: Table(shard.original_ids[t], shard.num_all[t], config.hidden)
            for t in shard.data.node_type_names
            if t not in shard.features
        }
        first = self.model.one_hot if isinstance(self.model, RGCN) else None
        #: The graph of the first layer, where its sources are pairs of a node and a relation.
        self.pairs: PartitionData | None = None
        if first is not None:
            tables, self.pairs = one_hot_tables(shard, first)
            if self.pairs is not None:
                pairs = self.pairs.to(self.device, feature_device="cpu")
                self.graphs[0] = self._shard.graph_of(pairs, config, width)
        self.embeddings = NodeEmbeddings(tables, config.seed, config.torch_dtype)
        self.model.to(self.device)
        self.embeddings.to(self.device)
        if is_initialized():
            sync_params(self.model)
        self._named = {
            **{f"model/{name}": p for name, p in self.model.named_parameters()},
            **{f"embeddings/{name}": p for name, p in self.embeddings.named_parameters()},
        }
        chosen = {id(p) for p in [*self.model.penalized_parameters(), *self.embeddings.rows]}
        groups: list[dict[str, Any]] = [
            {
                "params": [p for p in self._named.values() if id(p) in chosen],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in self._named.values() if id(p) not in chosen]},
        ]
        self.optimizer = torch.optim.Adam(groups, lr=config.lr)
        #: The best model and embeddings so far, of which `keep` makes copies.
        self.best: tuple[dict[str, Tensor], ...] | None = None
        torch.manual_seed(dropout_seed(config.seed, rank()))

    def host_graph(self) -> GraphShardManager:
        """The graph on the CPU, as samplers want it; collective."""
        if self.device.type == "cpu":
            return self.graph
        return self._host.graph(self._config, self.model.exchanged_width())

    def scores(self) -> Tensor:
        """The model's output for this rank's nodes of the target type; collective."""
        rows = {**self._shard.features, **self.embeddings()}
        scores: Tensor = self.model(self.graphs, model_features(self._shard, rows))
        return scores

    def loss(self, scores: Tensor, split: str) -> Tensor:
        """This rank's share of the mean cross entropy over a split's nodes on all ranks."""
        rows = self._shard.rows[split]
        return summed_loss(scores[rows], self._shard.label[rows]) / self._shard.num_nodes[split]

    def descend(self, loss: Tensor, when: str) -> float:
        """Step down the sum of all ranks' losses; returns this rank's. Collective.

        Args:
            loss: This rank's share.
            when: The step, for the error: "epoch 3".

        Raises:
            FloatingPointError: On every rank, before the step, if the loss or a gradient of any
                rank is not finite; says which rank's, and what of it.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        value = float(loss.detach())
        gradients = {n: p.grad for n, p in self._named.items() if p.grad is not None}
        is_finite = math.isfinite(value) and all_finite(gradients.values())
        if reduce_ints([not is_finite], "max")[0]:
            self.raise_not_finite(f"the training loss of {when}", value, gradients)
        if is_initialized():
            gather_grads(self.model)
        self.optimizer.step()
        return value

    def raise_not_finite(
        self, what: str, value: float, gradients: Mapping[str, Tensor] | None = None
    ) -> None:
        """Stop all ranks, because a number of one is not finite: the origin is told. Collective.

        What one rank has in its rows reaches others with the messages, so the rank that speaks is
        one at which the error can have begun: features come before embeddings, these before what
        all ranks hold alike, and that before what follows from it.

        Args:
            what: The number, for the message.
            value: This rank's.
            gradients: Name of each parameter to its gradient.
        """
        text, order = describe_not_finite(
            {
                "features": self._shard.features,
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

    @torch.no_grad()
    def evaluate(self, splits: Sequence[str]) -> list[float]:
        """This rank's numbers for each split: nodes that are right, and share of the loss."""
        self.model.eval()
        scores = self.scores()
        right = scores.argmax(dim=1) == self._shard.label
        numbers = []
        for split in splits:
            rows = self._shard.rows[split]
            numbers += [float(right[rows].sum()), float(self.loss(scores, split))]
        return numbers

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
        for found, module, prefix in (
            (shared, self.model, "model/"),
            (local, self.embeddings, "embeddings/"),
        ):
            state = module.state_dict()
            wanted = {f"{prefix}{k}": v for k, v in state.items()}
            if module is self.embeddings:
                wanted["random"] = torch.get_rng_state()
                if GPU_RANDOM in found:
                    on_gpu = self.device.type == "cuda"
                    state_now = torch.cuda.get_rng_state(self.device) if on_gpu else None
                    wanted[GPU_RANDOM] = found[GPU_RANDOM] if state_now is None else state_now
            if is_evaluated:
                wanted |= {f"best/{k}": v for k, v in state.items()}
            _check_tensors(found, {**wanted, **self._optimizer_shapes(found, prefix)})
        self.model.load_state_dict(tensors_under(shared, "model/"))
        self.embeddings.load_state_dict(tensors_under(local, "embeddings/"))
        self.optimizer.state.clear()
        for name, value in tensors_under({**shared, **local}, "optimizer/").items():
            of_parameter, _, key = name.rpartition("/")
            parameter = self._named[of_parameter]
            # Adam counts its steps on the CPU, wherever the parameters are.
            place = torch.device("cpu") if key == "step" else parameter.device
            self.optimizer.state[parameter][key] = value.to(place, copy=True)
        torch.set_rng_state(local["random"].clone())
        if self.device.type == "cuda" and GPU_RANDOM in local:
            torch.cuda.set_rng_state(local[GPU_RANDOM].clone(), self.device)
        elif self.device.type == "cuda":
            torch.cuda.manual_seed(_drawn_seed(local["random"]))
        self.best = None
        if is_evaluated:
            bests = (tensors_under(found, "best/") for found in (shared, local))
            self.best = tuple({k: v.clone() for k, v in best.items()} for best in bests)

    def _optimizer_shapes(self, found: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Tensors like the moments there must be for those parameters that have any."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            keys = [f"optimizer/{name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")]
            if name.startswith(prefix) and any(key in found for key in keys):
                moments |= dict(zip(keys, (torch.empty(()), parameter, parameter), strict=True))
        return moments


def _drawn_seed(state: Tensor) -> int:
    """A seed that a generator of the CPU in this state would draw."""
    generator = torch.Generator()
    generator.set_state(state.clone())
    return int(torch.randint(2**63 - 1, (), generator=generator))


def _check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in dict.fromkeys([*wanted, *found]):
        if name not in found:
            raise ValueError(f"tensor '{name}' is missing")
        if name not in wanted:
            raise ValueError(f"the model has no '{name}'")
        mine, theirs = wanted[name], found[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise ValueError(
                f"'{name}' must be {mine.dtype} {list(mine.shape)} (got {theirs.dtype} "
                f"{list(theirs.shape)})"
            )


def model_features(shard: TrainingShard, rows: Mapping[str, Tensor]) -> Any:
    """What a model takes as features, from the rows of each node type or table."""
    if shard.is_typed:
        return rows
    return (rows[ROWS], rows[SELF_ROWS]) if SELF_ROWS in rows else rows[shard.target]


def summed_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, summed, in float32 at least."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum")


def build_model(shard: TrainingShard, config: ResolvedConfig) -> NodeClassifier:
    """The configured model for a graph, with weights from torch's default generator."""
    hidden, layers = config.hidden, config.layers
    classes, dropout = shard.num_classes, config.dropout
    if shard.is_typed:
        return TypedRGCN(
            {t: f.shape[1] for t, f in shard.features.items()},
            shard.data.canonical_etypes,
            shard.data.node_type_names,
            shard.target,
            hidden,
            classes,
            layers,
            config.num_bases,
            dropout,
        )
    features = shard.features.get(shard.target)
    if config.model == "rgcn":
        in_feats = None if features is None else features.shape[1]
        relations = shard.num_relations
        return RGCN(in_feats, hidden, classes, relations, layers, config.num_bases, dropout)
    width = hidden if features is None else features.shape[1]
    if config.model == "gat":
        return GAT(width, hidden, classes, layers, config.heads, dropout)
    if config.model == "gcn":
        return GCN(width, hidden, classes, layers, dropout)
    return SAGE(width, hidden, classes, layers, dropout, config.aggregator)


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
