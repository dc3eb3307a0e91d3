# SPDX-License-Identifier: Apache-2.0
"""FullBatchConfig and SampledConfig: all that a training run depends on, checked when it is made.

A field that is None takes the value of its model from `MODEL_DEFAULTS`: the settings with which the
model's paper, or the usual replication of it, reaches its published accuracy.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

MODELS = ("gcn", "sage", "gat", "rgcn")
AGGREGATIONS = ("auto", "sequential", "oneshot")
AGGREGATORS = ("mean", "gcn", "pool")
SAMPLERS = ("neighbor", "labor")
TRANSPORTS = ("auto", "collective", "replicated")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
HALO_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    # Kipf and Welling, ICLR 2017: Cora and Citeseer.
    "gcn": {
        "hidden": 16,
        "layers": 2,
        "heads": 1,
        "dropout": 0.5,
        "lr": 0.01,
        "weight_decay": 5e-4,
        "epochs": 200,
        "patience": 0,
        "num_bases": 0,
    },
    # Hamilton et al., NIPS 2017, mean aggregator; hidden width and L2 as for the other two.
    "sage": {
        "hidden": 16,
        "layers": 2,
        "heads": 1,
        "dropout": 0.5,
        "lr": 0.01,
        "weight_decay": 5e-4,
        "epochs": 200,
        "patience": 0,
        "num_bases": 0,
    },
    # Velickovic et al., ICLR 2018: Cora and Citeseer.
    "gat": {
        "hidden": 8,
        "layers": 2,
        "heads": 8,
        "dropout": 0.6,
        "lr": 0.005,
        "weight_decay": 5e-4,
        "epochs": 300,
        "patience": 100,
        "num_bases": 0,
    },
    # Schlichtkrull et al., ESWC 2018: AIFB and MUTAG (which differ in L2 and bases).
    "rgcn": {
        "hidden": 16,
        "layers": 2,
        "heads": 1,
        "dropout": 0.0,
        "lr": 0.01,
        "weight_decay": 5e-4,
        "epochs": 50,
        "patience": 0,
        "num_bases": 0,
    },
}

#: Fields that may differ between a run and the run that resumes it.
FREE_FIELDS = frozenset(
    {
        "data",
        "epochs",
        "patience",
        "timeout",
        "save_every",
        "checkpoint_dir",
        "resume",
        # how rows and samples are brought about, not what they are
        "transport",
        "map_features",
        "cache_bytes",
        "prefetch",
    }
)

DEFAULT_FANOUT = 10


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What full-batch and sampled training runs have in common. All ranks must make the same one.

    Args:
        data: The JSON that `graphshard.distributed.partition_graph` wrote.
        model: ``"gcn"``, ``"sage"``, ``"gat"`` or ``"rgcn"``.
        aggregator: Of a SAGE: ``"mean"``, ``"gcn"`` or ``"pool"``; see
            `graphshard.nn.SAGEConv`.
        aggregation: ``"auto"``, ``"sequential"`` or ``"oneshot"``: how remote rows are fetched
            where a step, or an evaluation, is on the whole graph.
        hidden: Width of the hidden layers; for a GAT, of one head.
        layers: Number of layers.
        heads: Attention heads of a GAT's hidden layers.
        dropout: Probability, for inputs of layers and for attention.
        lr: Learning rate of Adam.
        weight_decay: L2 penalty, on the parameters that the model's paper puts it on.
        epochs: Number of epochs.
        patience: Stop after so many evaluations without a better validation result; 0 never.
        seed: Decides initial weights, embeddings, samples and, with the rank, dropout.
        num_bases: Matrices that the relations of an R-GCN share; 0: one for each relation.
        dtype: ``"float32"``, ``"float64"`` or ``"bfloat16"``.
        eval_every: Evaluate after every so many epochs, and after the last.
        timeout: Seconds that a wait for another rank may take.
        save_every: Write a checkpoint after every so many epochs; 0: none.
        checkpoint_dir: Where checkpoints are; must be one folder for all ranks.
        resume: Continue from the newest checkpoint in ``checkpoint_dir``, if there is one.

    Raises:
        ValueError: A field is out of range or does not fit another.
    """

    mode: ClassVar[str]

    data: str
    model: str = "gcn"
    aggregator: str = "mean"
    aggregation: str = "auto"
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    dropout: float | None = None
    lr: float | None = None
    weight_decay: float | None = None
    epochs: int | None = None
    patience: int | None = None
    seed: int = 0
    num_bases: int | None = None
    dtype: str = "float32"
    eval_every: int = 1
    timeout: float = 300.0
    save_every: int = 0
    checkpoint_dir: str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        _one_of("model", self.model, MODELS)
        _one_of("aggregator", self.aggregator, AGGREGATORS)
        _one_of("aggregation", self.aggregation, AGGREGATIONS)
        _one_of("dtype", self.dtype, tuple(DTYPES))
        for name in ("hidden", "layers", "heads", "epochs", "eval_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("patience", "num_bases", "save_every", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number, at least 0 (got {value})")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1) (got {self.dropout})")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds (got {self.timeout})")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63 (got {self.seed})")
        if self.model != "gat" and self.heads not in (None, 1):
            raise ValueError(f"heads is for the model gat (got heads={self.heads}, {self.model})")
        if self.model != "sage" and self.aggregator != "mean":
            raise ValueError(
                f"aggregator is for the model sage (got aggregator={self.aggregator!r}, "
                f"{self.model})"
            )
        if self.model != "rgcn" and self.num_bases:
            raise ValueError(
                f"num_bases is for the model rgcn (got num_bases={self.num_bases}, {self.model})"
            )
        if self.checkpoint_dir is None and (self.save_every or self.resume):
            what = "save_every" if self.save_every else "resume"
            raise ValueError(f"{what} needs checkpoint_dir, the folder of the checkpoints")

    def graph_options(self) -> dict[str, Any]:
        """How the whole graph is put together; for `graphshard.construct_full_graph`."""
        return {"mode": self.aggregation}

    def _filled(self) -> dict[str, Any]:
        """All fields, with the model's own values where they were None."""
        values = dataclasses.asdict(self)
        defaults = MODEL_DEFAULTS[self.model]
        return {k: defaults[k] if v is None and k in defaults else v for k, v in values.items()}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(RunConfig):
    """A `RunConfig` in which no field of the model is open."""

    hidden: int
    layers: int
    heads: int
    dropout: float
    lr: float
    weight_decay: float
    epochs: int
    patience: int
    num_bases: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def to_json(self) -> str:
        """All fields, as JSON with sorted keys."""
        return json.dumps({"mode": self.mode, **dataclasses.asdict(self)}, sort_keys=True)

    def fixed_fields(self) -> dict[str, Any]:
        """What a run that resumes this one must have in common with it."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in FREE_FIELDS}


@dataclass(frozen=True, kw_only=True)
class FullBatchConfig(RunConfig):
    """A full-batch training run; see `RunConfig` for the fields that are not described here.

    Args:
        rematerialize: With sequential aggregation, fetch remote rows again in the backward.
        prefetch: Remote shards that are under way while another is computed; 0: none. See
            `graphshard.fullbatch.AggregationMode`.
        halo_dtype: ``"bfloat16"`` or ``"float16"``: remote rows and their gradients travel in it;
            None: in the dtype of the run.
    """

    mode: ClassVar[str] = "full"

    rematerialize: bool = True
    prefetch: int = 1
    halo_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("prefetch", self.prefetch, 0)
        if self.halo_dtype is not None:
            _one_of("halo_dtype", self.halo_dtype, tuple(HALO_DTYPES))

    def graph_options(self) -> dict[str, Any]:
        return {
            **super().graph_options(),
            "rematerialize": self.rematerialize,
            "prefetch": self.prefetch,
            "halo_dtype": None if self.halo_dtype is None else HALO_DTYPES[self.halo_dtype],
        }

    def resolved(self) -> ResolvedFullBatchConfig:
        """The same run with the model's own values where a field was None."""
        return ResolvedFullBatchConfig(**self._filled())


@dataclass(frozen=True, kw_only=True)
class ResolvedFullBatchConfig(FullBatchConfig, ResolvedConfig):
    """A `FullBatchConfig` in which no field of the model is open."""


@dataclass(frozen=True, kw_only=True)
class SampledConfig(RunConfig):
    """A sampled training run; see `RunConfig` for the fields that are not described here.

    In each step every rank draws a block for each layer, for ``batch_size`` of its own training
    nodes. Evaluations are exact, on the whole graph.

    Args:
        fanouts: Neighbours drawn for each node and relation, one number per layer, the last one
            for the training nodes; -1: all. None: 10 in each layer.
        batch_size: Training nodes of each rank in a step; 0: all.
        sampler: ``"neighbor"`` or ``"labor"``.
        replace: Draw with replacement.
        transport: ``"auto"``, ``"collective"`` or ``"replicated"``: where neighbours are drawn.
        map_features: Ranks on one host read each other's feature rows from shared memory.
        cache_bytes: Memory of each rank for often used rows of other ranks, or, with
            ``map_features``, of other hosts.
        prefetch: Batches that are made ready ahead of the step that uses them; 0: none.
    """

    mode: ClassVar[str] = "sample"

    fanouts: tuple[int, ...] | None = None
    batch_size: int = 1000
    sampler: str = "neighbor"
    replace: bool = False
    transport: str = "auto"
    map_features: bool = True
    cache_bytes: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("sampler", self.sampler, SAMPLERS)
        _one_of("transport", self.transport, TRANSPORTS)
        for name in ("batch_size", "cache_bytes", "prefetch"):
            _at_least(name, getattr(self, name), 0)
        if self.replace and self.sampler == "labor":
            raise ValueError("replace is for the sampler neighbor; labor draws without replacement")
        if self.fanouts is None:
            return
        object.__setattr__(self, "fanouts", tuple(self.fanouts))  # a list, where JSON was read
        if not self.fanouts:
            raise ValueError("fanouts must hold one number per layer (got none)")
        for fanout in self.fanouts:
            _at_least("a fanout", fanout, -1)
        if self.replace and -1 in self.fanouts:
            raise ValueError(
                f"all neighbours (-1) cannot be drawn with replacement (got fanouts={self.fanouts})"
            )
        if self.layers is not None and self.layers != len(self.fanouts):
            raise ValueError(
                f"fanouts must hold one number per layer (got {len(self.fanouts)} for "
                f"layers={self.layers})"
            )

    def resolved(self) -> ResolvedSampledConfig:
        """The same run with the model's own values where a field was None."""
        values = self._filled()
        if self.fanouts is None:
            values["fanouts"] = (DEFAULT_FANOUT,) * values["layers"]
        else:
            values["layers"] = len(self.fanouts)
        return ResolvedSampledConfig(**values)


@dataclass(frozen=True, kw_only=True)
class ResolvedSampledConfig(SampledConfig, ResolvedConfig):
    """A `SampledConfig` in which no field of the model is open."""

    fanouts: tuple[int, ...]


CONFIGS: dict[str, type[FullBatchConfig] | type[SampledConfig]] = {
    kind.mode: kind for kind in (FullBatchConfig, SampledConfig)
}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)} (got {value!r})")


def _at_least(name: str, value: int | None, lowest: int) -> None:
    if value is not None and value < lowest:
        raise ValueError(f"{name} must be at least {lowest} (got {value})")
