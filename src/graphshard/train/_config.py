# SPDX-License-Identifier: Apache-2.0
"""FullBatchConfig: everything a training run depends on, checked when it is made.

A field that is None takes the value of its model from `MODEL_DEFAULTS`: the settings with which the
model's paper, or the usual replication of it, reaches its published accuracy.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import torch

MODELS = ("gcn", "sage", "gat", "rgcn")
AGGREGATIONS = ("auto", "sequential", "oneshot")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}

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
    {"data", "epochs", "patience", "timeout", "save_every", "checkpoint_dir", "resume"}
)


@dataclass(frozen=True, kw_only=True)
class FullBatchConfig:
    """A full-batch training run. All ranks must make the same one.

    Args:
        data: The JSON that `graphshard.distributed.partition_graph` wrote.
        model: ``"gcn"``, ``"sage"``, ``"gat"`` or ``"rgcn"``.
        aggregation: ``"auto"``, ``"sequential"`` or ``"oneshot"``: how remote rows are fetched.
        rematerialize: With sequential aggregation, fetch remote rows again in the backward.
        hidden: Width of the hidden layers; for a GAT, of one head.
        layers: Number of layers.
        heads: Attention heads of a GAT's hidden layers.
        dropout: Probability, for inputs of layers and for attention.
        lr: Learning rate of Adam.
        weight_decay: L2 penalty, on the parameters that the model's paper puts it on.
        epochs: Number of epochs.
        patience: Stop after so many evaluations without a better validation result; 0 never.
        seed: Decides initial weights, embeddings and, with the rank, dropout.
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

    data: str
    model: str = "gcn"
    aggregation: str = "auto"
    rematerialize: bool = True
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
        if self.model != "rgcn" and self.num_bases:
            raise ValueError(
                f"num_bases is for the model rgcn (got num_bases={self.num_bases}, {self.model})"
            )
        if self.checkpoint_dir is None and (self.save_every or self.resume):
            what = "save_every" if self.save_every else "resume"
            raise ValueError(f"{what} needs checkpoint_dir, the folder of the checkpoints")

    def resolved(self) -> ResolvedConfig:
        """The same run with the model's own values where a field was None."""
        values = dataclasses.asdict(self)
        defaults = MODEL_DEFAULTS[self.model]
        return ResolvedConfig(
            **{k: defaults[k] if v is None and k in defaults else v for k, v in values.items()}
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(FullBatchConfig):
    """A `FullBatchConfig` in which no field of the model is open."""

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
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def fixed_fields(self) -> dict[str, Any]:
        """What a run that resumes this one must have in common with it."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in FREE_FIELDS}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)} (got {value!r})")


def _at_least(name: str, value: int | None, lowest: int) -> None:
    if value is not None and value < lowest:
        raise ValueError(f"{name} must be at least {lowest} (got {value})")
