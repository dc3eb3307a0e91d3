# SPDX-License-Identifier: Apache-2.0
"""FullBatchConfig and SampledConfig: all that a training run depends on, checked when it is made.

A field's annotation has its type, its choices, its lowest value and what it is; the command line is
made from these fields, and adds nothing to them. A field that is None takes a value by the model
and by what is known of the data: see `graphshard.train._defaults`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

from .._base.settings import LONGEST_TIMEOUT, OnlyWith, Unset, notes_of
from ._defaults import MODEL_DEFAULTS, PAPER, GraphFacts, defaults_of
from ._reports import check_extras

if TYPE_CHECKING:
    import torch  # a help text is made without it

MODELS = ("gcn", "sage", "gat", "gatv2", "rgcn", "hgt")
"""Names of the networks that come with the package."""

NEED_IN_EDGES = ("gcn", "gat", "gatv2")
"""Models that make of a node without in-edges nothing, and see a node's own row by a self loop."""

BALANCED = "balanced"

TaskName = Literal[
    "node classification",
    "node regression",
    "edge classification",
    "edge regression",
    "link prediction",
]

#: Fields that may differ between a run and the run that resumes it.
FREE_FIELDS = frozenset(
    "data device epochs patience timeout save_every checkpoint_dir resume".split()
    # how rows and samples are brought about, not what they are
    + "transport map_features cache_bytes prefetch memory".split()
    # what is written down
    + "run plot tensorboard".split()
    # what they come to is compared instead
    + "self_loops both_directions".split()
)

#: Fields of which earlier versions knew nothing: a checkpoint of theirs has the default.
_NEWER_FIELDS = frozenset(
    "model_args optimizer schedule warmup clip_norm class_weights autocast self_loops "
    "both_directions norm residual encoder task loss metrics predictor negatives relations "
    "exclude_targets".split()
)

DEFAULT_FANOUT = 10

#: Of Adam: its steps are ten times as long at first, and must fit float32.
_HIGHEST_RATE = 1e37


@dataclass(frozen=True)
class Lowest:
    """The lowest value of a field, in its annotation."""

    value: int


def _of_model(name: str) -> Unset:
    """What a field that is None stands for with few labels; with more, see [Note: defaults]."""
    other = {m: v[name] for m, v in MODEL_DEFAULTS.items() if v[name] != PAPER[name]}
    return Unset("; ".join([str(PAPER[name]), *(f"{m}: {v}" for m, v in other.items())]))


_FOR_EXCHANGES = OnlyWith("aggregation", ("sequential", "auto"))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What full-batch and sampled training runs have in common. All ranks must make the same one.

    What each field is stands in its annotation, and in ``graphshard train --help``. More on some:
    ``data`` is the JSON that `graphshard.partition.partition_graph` wrote, and ``checkpoint_dir``
    one folder for all ranks. For ``aggregator`` see `graphshard.nn.SAGEConv`. Dropout falls on the
    inputs of layers and on attention; with the rank, ``seed`` decides it. Samples depend on
    ``seed``, too. The last epoch is always evaluated. To resume where there is no checkpoint yet is
    to start.

    With ``device="cuda"`` the ranks of a host take its GPUs in turn, by their local rank; with
    ``"cuda:N"`` all take that one. A run may resume on another device: weights, moments and
    epochs go on, while dropout draws other numbers there.

    Raises:
        ValueError: A field is out of range or does not fit another.
    """

    mode: ClassVar[str]

    data: Annotated[str, "The JSON of a partition."]
    device: Annotated[
        str, "Where to compute: auto (a GPU, if torch sees one), cpu, cuda or cuda:N."
    ] = "auto"
    model: Annotated[
        str,
        "Which network: gcn, sage, gat, gatv2, rgcn or hgt; or a class of your own, "
        "my_package.my_module:Net.",
        Unset("gcn; by command rgcn where edges carry relation numbers"),
    ] = "gcn"
    model_args: Annotated[
        Mapping[str, Any] | None,
        "your own model: further keyword arguments of the class, name=value,...",
        Unset("none"),
    ] = None
    aggregator: Annotated[
        Literal["mean", "gcn", "pool"],
        "sage: how neighbours are put together.",
        OnlyWith("model", ("sage",)),
    ] = "mean"
    aggregation: Annotated[
        Literal["auto", "sequential", "oneshot"], "How rows of other workers are fetched."
    ] = "auto"
    hidden: Annotated[
        int | None,
        "Width of hidden layers; gat, gatv2: of one head.",
        Lowest(1),
        _of_model("hidden"),
    ] = None
    layers: Annotated[int | None, "Number of layers.", Lowest(1), _of_model("layers")] = None
    heads: Annotated[
        int | None,
        "gat, gatv2: heads of the hidden layers; hgt: of all.",
        Lowest(1),
        OnlyWith("model", ("gat", "gatv2", "hgt")),
        Unset("8; hgt: 4"),
    ] = None
    dropout: Annotated[float | None, "Probability of dropout.", _of_model("dropout")] = None
    residual: Annotated[
        bool | None,
        "gcn, sage, gat, gatv2: add a node's own row, times a matrix, in each layer.",
        OnlyWith("model", ("gcn", "sage", "gat", "gatv2")),
        _of_model("residual"),
    ] = None
    norm: Annotated[
        bool | None,
        "gcn, sage, gat, gatv2: normalise the rows of hidden layers.",
        OnlyWith("model", ("gcn", "sage", "gat", "gatv2")),
        _of_model("norm"),
    ] = None
    encoder: Annotated[
        bool | None,
        "gcn, sage, gat, gatv2: a linear layer and a ReLU of each node by itself before the first "
        "layer; typed graphs: a ReLU after the matrix of each type's features.",
        OnlyWith("model", ("gcn", "sage", "gat", "gatv2")),
        _of_model("encoder"),
    ] = None
    lr: Annotated[float | None, "Learning rate of Adam.", _of_model("lr")] = None
    optimizer: Annotated[
        Literal["adam", "adamw"], "adamw: weight decay apart from the gradient."
    ] = "adam"
    schedule: Annotated[
        Literal["constant", "cosine"], "Of the learning rate; cosine: down to 0 at the last epoch."
    ] = "constant"
    warmup: Annotated[int, "Epochs in which the learning rate rises at first.", Lowest(0)] = 0
    clip_norm: Annotated[
        float | None, "Longest gradient, of all parameters as one vector.", Unset("any")
    ] = None
    class_weights: Annotated[
        str | Mapping[str, float] | None,
        "Factors of the loss by class: balanced, or name=weight,... for each class.",
        Unset("1 for each"),
    ] = None
    weight_decay: Annotated[
        float | None, "L2 penalty, where the model's paper puts it.", _of_model("weight_decay")
    ] = None
    epochs: Annotated[int | None, "Number of epochs.", Lowest(1), _of_model("epochs")] = None
    patience: Annotated[
        int | None,
        "Stop after so many evaluations without a better one; 0: never.",
        Lowest(0),
        _of_model("patience"),
    ] = None
    seed: Annotated[int, "Of weights, embeddings and dropout.", Lowest(0)] = 0
    num_bases: Annotated[
        int | None,
        "rgcn: matrices that relations share; 0: one each.",
        Lowest(0),
        OnlyWith("model", ("rgcn",)),
        _of_model("num_bases"),
    ] = None
    dtype: Annotated[Literal["float32", "float64", "bfloat16"], "Of features and weights."] = (
        "float32"
    )
    task: Annotated[TaskName | None, "What to learn.", Unset("what the partition is for")] = None
    relations: Annotated[
        str | None,
        "Tasks on edges: the relations whose edges are learnt, names or source:name:target between "
        "commas.",
        Unset("those of the task"),
    ] = None
    loss: Annotated[
        Literal["mse", "l1", "softmax", "bce"] | None,
        "What is minimised: mse or l1 for values; for links softmax, of an edge among negatives, "
        "or bce, of each.",
        Unset("mse; softmax"),
    ] = None
    predictor: Annotated[
        Literal["dot", "distmult"] | None,
        "Links: how the rows of both ends make a score; distmult: with factors of the relation.",
        Unset("dot; distmult where edges carry relation numbers"),
    ] = None
    negatives: Annotated[
        int | None,
        "Links: nodes drawn in a step as wrong ends, for all its edges.",
        Lowest(1),
        Unset("256; 1024 where edges carry relation numbers"),
    ] = None
    metrics: Annotated[
        str | None,
        "What is computed in evaluations, words between commas, such as accuracy,macro_f1,auroc,"
        "average_precision, or rmse,mae, or mrr,hits@10; the first chooses the best model.",
        Unset("the usual ones of the task"),
    ] = None
    autocast: Annotated[
        bool, "Compute in bfloat16 where torch.autocast does; weights stay as they are."
    ] = False
    self_loops: Annotated[
        bool | None,
        "Give nodes without a self loop one, of plain graphs.",
        Unset("yes for gcn, gat and gatv2"),
    ] = None
    both_directions: Annotated[
        bool | None,
        "Add the reverse of each edge where it is missing; of typed graphs, as a relation.",
        Unset("yes, but for relation numbers of rgcn"),
    ] = None
    eval_every: Annotated[int, "Evaluate after every so many epochs.", Lowest(1)] = 1
    timeout: Annotated[float, "Seconds that a wait for another worker may take."] = 300.0
    save_every: Annotated[
        int, "Write a checkpoint after every so many epochs; 0: none.", Lowest(0)
    ] = 0
    checkpoint_dir: Annotated[str | None, "Folder of the checkpoints.", Unset("none")] = None
    resume: Annotated[bool, "Continue from the newest checkpoint."] = False
    memory: Annotated[
        str | None,
        "What a worker may take, such as 2GiB: features stay in the files of the partition. full: "
        "they are read block by block; sample: what is left is for rows that are read most.",
        Unset("features are in memory"),
    ] = None
    run: Annotated[
        str | None,
        "Folder of what the run leaves: config.toml, history.jsonl, a line an evaluation, and "
        "checkpoints without --checkpoint-dir.",
        Unset("nothing is written"),
    ] = None

    plot: Annotated[bool, "Draw the history of the run to run.png in its folder."] = False
    tensorboard: Annotated[
        str | None, "Folder to write the history to, for TensorBoard.", Unset("none")
    ] = None

    def __post_init__(self) -> None:
        if isinstance(self.memory, int):
            object.__setattr__(self, "memory", str(self.memory))
        bytes_of(self.memory)
        for name in ("data", "checkpoint_dir", "run", "tensorboard"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            _check_field(name, getattr(self, name, None), hint)
        from .._base.device import check_device_name

        check_device_name(self.device)
        self._check_model()
        self._check_optimizer()
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number, at least 0 (got {value})")
            if value is not None and value > _HIGHEST_RATE:
                raise ValueError(f"{name} must be at most {_HIGHEST_RATE:g} (got {value})")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1) (got {self.dropout})")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds (got {self.timeout})")
        if self.timeout > LONGEST_TIMEOUT:
            raise ValueError(
                f"timeout must be at most {LONGEST_TIMEOUT:,} seconds (got {self.timeout})"
            )
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63 (got {self.seed})")
        own = {field.name: field.default for field in dataclasses.fields(self)} | PAPER
        # Programs may leave set what is about speed alone.
        self.check_given(
            name
            for name, default in own.items()
            if name not in FREE_FIELDS and getattr(self, name) not in (None, default)
        )
        if self.plot and self.run is None:
            raise ValueError("plot needs run, the folder of the run, where the picture goes")
        check_extras(plot=self.plot, tensorboard=self.tensorboard)
        if (
            self.run is not None
            and self.checkpoint_dir is None
            and (self.save_every or self.resume)
        ):
            object.__setattr__(self, "checkpoint_dir", os.path.join(self.run, "checkpoints"))
        if self.checkpoint_dir is None and (self.save_every or self.resume):
            what = "save_every" if self.save_every else "resume"
            raise ValueError(f"{what} needs checkpoint_dir, the folder of the checkpoints, or run")
        if self.checkpoint_dir is not None and not (self.save_every or self.resume):
            raise ValueError(
                f"checkpoint_dir has no effect without save_every or resume (got "
                f"checkpoint_dir={self.checkpoint_dir!r}); give save_every=N to write a checkpoint "
                "after every N epochs"
            )

    def _check_model(self) -> None:
        if ":" not in self.model and self.model not in MODELS:
            nearest = difflib.get_close_matches(self.model, MODELS, 1)
            meant = f"did you mean {nearest[0]}?" if nearest else "write my_package.my_module:Net"
            raise ValueError(
                f"model must be one of {', '.join(MODELS)}, or the module and class of your own "
                f"(got {self.model!r}); {meant}"
            )
        if self.model_args is not None and ":" not in self.model:
            raise ValueError(
                f"model_args is for a model of your own, my_package.my_module:Net (got {self.model}"
                "); leave it out"
            )

    def _check_optimizer(self) -> None:
        if self.clip_norm is not None and not (
            math.isfinite(self.clip_norm) and self.clip_norm > 0
        ):
            raise ValueError(f"clip_norm must be a number above 0 (got {self.clip_norm})")
        if self.autocast and self.dtype != "float32":
            raise ValueError(
                f"autocast is for weights in float32 (got dtype {self.dtype}); give one of them"
            )
        weights = self.class_weights
        if isinstance(weights, str):
            if weights != BALANCED:
                raise ValueError(
                    f"class_weights must be {BALANCED!r}, or a weight by class name (got "
                    f"{weights!r}); write name=weight,..."
                )
            return
        for name, weight in (weights or {}).items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(
                    f"a class weight must be a number, at least 0 (got {weight} for {name})"
                )

    def check_given(self, names: Iterable[str]) -> None:
        """Whether each of these fields, which were given a value, has an effect."""
        hints = get_type_hints(type(self), include_extras=True)
        for name in names:
            for note in notes_of(hints.get(name), OnlyWith):
                current = getattr(self, note.field)
                if current not in note.values:
                    raise ValueError(
                        f"{name} is for the {note.field} {' or '.join(note.values)} (got "
                        f"{name}={getattr(self, name)!r}, {current}); leave it out"
                    )

    def to_json(self) -> str:
        """All fields and the mode, as JSON with sorted keys; `config_from_json` is the way back."""
        return json.dumps({"mode": self.mode, **dataclasses.asdict(self)}, sort_keys=True)

    @property
    def memory_bytes(self) -> float | None:
        """What a worker may take, if features stay in files; None where they are in memory."""
        return bytes_of(self.memory)

    def graph_options(self) -> dict[str, Any]:
        """How the whole graph is put together; for `graphshard.construct_full_graph`."""
        return {"mode": self.aggregation}

    def _filled(self, facts: GraphFacts | None) -> dict[str, Any]:
        """All fields, with the model's own values where they were None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults, _ = defaults_of(self.model, facts)
        filled = {k: defaults[k] if v is None and k in defaults else v for k, v in values.items()}
        if self.model == "hgt" and self.heads is None:  # heads divide the width
            filled["heads"] = math.gcd(filled["heads"], filled["hidden"])
        return filled


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
    residual: bool
    norm: bool
    encoder: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    def fixed_fields(self) -> dict[str, Any]:
        """What a run that resumes this one must have in common with it."""
        fields = {f.name: f.default for f in dataclasses.fields(self)}
        fixed = {
            name: getattr(self, name)
            for name, default in fields.items()
            if name not in FREE_FIELDS
            and not (name in _NEWER_FIELDS and getattr(self, name) in (default, False))
        }
        if self.schedule != "constant":  # it depends on where it ends
            fixed["epochs"] = self.epochs
        return fixed


@dataclass(frozen=True, kw_only=True)
class FullBatchConfig(RunConfig):
    """A full-batch training run; see `RunConfig` for the fields that are not described here.

    With ``memory``, a text or a number of bytes, the first layer reads features from their files, a
    block at a time, and what else a worker needs is held against it before the first epoch.

    For ``prefetch`` see `graphshard.fullbatch.AggregationMode`; gradients of remote rows travel in
    ``halo_dtype``, too.
    """

    mode: ClassVar[str] = "full"

    rematerialize: Annotated[
        bool, "full, with sequential aggregation: fetch rows again in the backward.", _FOR_EXCHANGES
    ] = True
    prefetch: Annotated[
        int,
        "full, with sequential aggregation: parts of other workers whose rows are in flight while "
        "one is computed; 0: none.",
        Lowest(0),
        _FOR_EXCHANGES,
    ] = 1
    halo_dtype: Annotated[
        Literal["bfloat16", "float16", "int8"] | None,
        "full: rows of other workers travel in it, rounded.",
        Unset("as they are"),
    ] = None

    def graph_options(self) -> dict[str, Any]:
        return {
            **super().graph_options(),
            "rematerialize": self.rematerialize,
            "prefetch": self.prefetch,
            "halo_dtype": None if self.halo_dtype is None else torch_dtype(self.halo_dtype),
        }

    def resolved(self, facts: GraphFacts | None = None) -> ResolvedFullBatchConfig:
        """The same run with the model's own values where a field was None.

        Args:
            facts: Of the graph, on which these depend; None: those of a small citation graph.
        """
        return ResolvedFullBatchConfig(**self._filled(facts))


@dataclass(frozen=True, kw_only=True)
class ResolvedFullBatchConfig(FullBatchConfig, ResolvedConfig):
    """A `FullBatchConfig` in which no field of the model is open."""


@dataclass(frozen=True, kw_only=True)
class SampledConfig(RunConfig):
    """A sampled training run; see `RunConfig` for the fields that are not described here.

    In each step every rank draws a block for each layer, for ``batch_size`` of its own training
    nodes. Evaluations are exact, on the whole graph. With ``map_features``, the cache is for rows
    of other hosts.

    With ``memory``, a text or a number of bytes, evaluations compute layer by layer, and what a
    layer gives is in a file without a name, in the folder of the run or that of the partition.
    """

    mode: ClassVar[str] = "sample"

    fanouts: Annotated[
        tuple[int, ...] | None,
        "sample: neighbours drawn per node and relation, one number per layer, the last for the "
        "training nodes, such as 15,10; -1: all.",
        Unset(f"{DEFAULT_FANOUT} in each layer"),
    ] = None
    batch_size: Annotated[
        int, "sample: training nodes of a worker in a step; 0: all.", Lowest(0)
    ] = 1000
    sampler: Annotated[Literal["neighbor", "labor"], "sample: how to draw."] = "neighbor"
    replace: Annotated[
        bool, "sample: draw with replacement.", OnlyWith("sampler", ("neighbor",))
    ] = False
    transport: Annotated[
        Literal["auto", "collective", "replicated"],
        "sample: where neighbours are drawn: at their owners, or everywhere from a copy of the "
        "structure.",
    ] = "auto"
    map_features: Annotated[bool, "sample: workers on one host share the memory of features."] = (
        True
    )
    cache_bytes: Annotated[
        int, "sample: memory of a worker for often used rows of others.", Lowest(0)
    ] = 0
    prefetch: Annotated[int, "sample: batches made ready ahead; 0: none.", Lowest(0)] = 2
    exclude_targets: Annotated[
        bool | None,
        "sample: tasks on edges: those of a step, and their reverses, carry no messages in it.",
        Unset("yes for links, no for labels"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_bytes is not None and self.cache_bytes:
            raise ValueError(
                f"cache_bytes is part of memory, which says it all (got cache_bytes="
                f"{self.cache_bytes}, memory={self.memory}); leave cache_bytes out"
            )
        if self.fanouts is None:
            return
        object.__setattr__(self, "fanouts", tuple(self.fanouts))  # a list, where JSON was read
        if not self.fanouts:
            raise ValueError("fanouts must hold one number per layer (got none)")
        for fanout in self.fanouts:
            _check_least("a fanout", fanout, -1)
        if self.replace and -1 in self.fanouts:
            raise ValueError(
                f"all neighbours (-1) cannot be drawn with replacement (got fanouts={self.fanouts})"
            )
        if self.layers is None and len(self.fanouts) == 1:
            num_layers = PAPER["layers"]
            twice = ",".join([str(self.fanouts[0])] * num_layers)
            raise ValueError(
                f"fanouts must hold one number per layer, and one number makes a network of one "
                f"layer (got {self.fanouts[0]}); for {num_layers} layers give fanouts {twice}, for "
                "one layer give layers=1 too"
            )
        if self.layers is not None and self.layers != len(self.fanouts):
            raise ValueError(
                f"fanouts must hold one number per layer (got {len(self.fanouts)} for "
                f"layers={self.layers})"
            )

    def resolved(self, facts: GraphFacts | None = None) -> ResolvedSampledConfig:
        """The same run with the model's own values where a field was None."""
        values = self._filled(facts)
        if self.fanouts is None:
            values["fanouts"] = (DEFAULT_FANOUT,) * values["layers"]
        else:
            values["layers"] = len(self.fanouts)
        return ResolvedSampledConfig(**values)


@dataclass(frozen=True, kw_only=True)
class ResolvedSampledConfig(SampledConfig, ResolvedConfig):
    """A `SampledConfig` in which no field of the model is open."""

    fanouts: tuple[int, ...]


def config_from_json(text: str) -> FullBatchConfig | SampledConfig:
    """Inverse of `RunConfig.to_json`, of a configuration that has not been resolved."""
    values = json.loads(text)
    kinds = {kind.mode: kind for kind in (FullBatchConfig, SampledConfig)}
    return kinds[values.pop("mode")](**values)


def bytes_of(memory: str | None) -> float | None:
    """The number of bytes that a setting says, if it does."""
    from ..plan import parse_bytes

    return None if memory is None else parse_bytes(memory)


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _check_field(name: str, value: Any, hint: Any) -> None:
    """Hold a value against the choices and the lowest value in its annotation; None fits all."""
    if value is None or get_origin(hint) is not Annotated:
        return
    kind = get_args(hint)[0]
    for choice in (kind, *get_args(kind)):
        if get_origin(choice) is Literal and value not in (allowed := get_args(choice)):
            raise ValueError(f"{name} must be one of {', '.join(allowed)} (got {value!r})")
    for note in notes_of(hint, Lowest):
        _check_least(name, value, note.value)


def _check_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest} (got {value})")


def generators_of(name: str) -> list[torch.device]:
    """GPUs whose random numbers a run in this process may draw; for `torch.random.fork_rng`."""
    with contextlib.suppress(ValueError):  # the run itself says so, on every rank
        from .._base.device import choose_device

        device = choose_device(name)
        if device.type == "cuda":
            return [device]
    return []
