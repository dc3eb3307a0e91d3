# SPDX-License-Identifier: Apache-2.0
"""predict: what the model of a run says of the nodes or edges of a partition, by the user's ids.

Every rank computes the rows that it owns, with the model on the whole graph, as an evaluation does;
nothing is sampled, and no rank gathers the others' rows. Each writes its rows to a file of its own,
in the order of the original row numbers, and rank 0 merges these files, a few batches at a time,
into one: so the result is the same row for row for any number of parts, and is there whole or not
at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor, nn

from .._base.device import choose_device
from .._base.files import TemporaryFolder, remove_abandoned
from .._base.memory import PeakMemory
from ..comm import (
    agree,
    barrier,
    is_initialized,
    rank,
    shutdown_comms,
    world_size,
)
from ..comm.collectives import reduce_ints, shared_errors
from ..data.dataset import SPLITS
from ..data.labels import Labels
from ..data.remote_files import is_file, shown
from ..data.task import TaskInfo, read_task
from ..fullbatch import PartitionData, load_dgl_partition_data
from ..fullbatch.topology import agree_on_build
from ..partition.format import etype_key, read_config
from ._checkpoint import read_best_rows
from ._config import (
    NEED_IN_EDGES,
    ResolvedConfig,
    ResolvedSampledConfig,
    bytes_of,
    generators_of,
)
from ._export import ModelCard, digest_of_ids, read_card, user_ids_of
from ._layerwise import LayerwiseRows
from ._learner import Learner
from ._links import LinkPredictor
from ._models import NodeClassifier
from ._own_model import LayeredNetwork
from ._planned import RunPlanner, room_beside
from ._predict_edges import DEFAULT_TOP as DEFAULT_TOP_LINKS
from ._predict_edges import Ends, LinkScores, alike, joined_ids
from ._prediction_files import ROW, plain_ids, read_ids, write_merged, writer_of
from ._sampled_inputs import SampledInputs
from ._tasks import LINK_PREDICTION, Classes, Links, SeveralLabels, Task, Values
from ._training_shard import (
    TaskRows,
    TrainingShard,
    _relation,
    _with_edges_added,
    _without_held_out,
    assemble,
    check_num_workers,
)

if TYPE_CHECKING:
    import pyarrow as pa

UNLABELLED, ALL = "unlabelled", "all"
CHOICES = (UNLABELLED, ALL, *SPLITS)
"""What ``nodes`` may be besides a file."""

MOST_COLUMNS = 100
"""Classes up to which each has a column of its own."""
DEFAULT_TOP = 5

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """What `predict` was asked for; all ranks must have the same.

    Raises:
        ValueError: A field is out of range.
    """

    data: str
    run: str
    out: str | None = None
    nodes: str = ALL
    embeddings: bool = False
    top: int | None = None
    pairs: str | None = None
    relations: str | None = None
    device: str = "auto"
    memory: str | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if isinstance(self.memory, int):
            object.__setattr__(self, "memory", str(self.memory))
        bytes_of(self.memory)
        for name in ("data", "run", "out", "nodes", "pairs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if self.top is not None and self.top < 1:
            raise ValueError(f"top must be at least 1 (got {self.top})")
        if self.out is not None:
            writer_of(Path(self.out))
        if self.pairs is not None and not is_file(self.pairs):
            raise ValueError(f"pairs must be a file (got {shown(self.pairs)!r}, and there is none)")
        if self.nodes not in CHOICES and not is_file(self.nodes):
            raise ValueError(
                f"nodes must be one of {', '.join(CHOICES)}, or a file of ids (got "
                f"{shown(self.nodes)!r}, and there is no such file)"
            )

    def to_json(self) -> str:
        """All fields, and the mode by which a worker knows what they are."""
        return json.dumps({"mode": "predict", **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PredictRequest:
        """Inverse of `to_json`."""
        values = json.loads(text)
        del values["mode"]
        return cls(**values)


@overload
def predict(
    data: str | os.PathLike[str], run: str | os.PathLike[str], out: None = None, **options: Any
) -> pa.Table: ...


@overload
def predict(
    data: str | os.PathLike[str],
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    **options: Any,
) -> Path: ...


def predict(
    data: str | os.PathLike[str],
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> pa.Table | Path:
    """Predict with the best model of a run, exactly, on a whole partitioned graph.

    Called where there is no process group, this starts a worker for each part and waits for them.
    Called on ranks, one for each part, it is collective.

    The columns are ``id``; ``prediction``; and for each class ``p_<class>``, or with ``top``, or
    for more than 100 classes, ``class_1``, ``p_1``, ``class_2``, ... of the most probable ones.
    Of a regression ``prediction`` is the value, or there are ``prediction_0``, ... of several.
    With several labels per node, ``prediction`` is the list of classes of probability 0.5 or more.
    ``id`` is the user's, or the node's original number where no tables were partitioned. Rows are
    in the order of those numbers: that of the node table. Of a task on edges there are ``source``
    and ``target`` instead, in the order of the table of edges. Of link prediction there are these
    and ``score``: of given pairs, or with ``rank`` of the best new links of each node. Where there
    are several relations, ``relation`` says which.

    Args:
        data: The JSON of a partition: of the graph of training, cut into any number of parts, or
            of other nodes with the same types, relations and features.
        run: Folder of the run, in which its model is.
        out: File to write, .parquet, .csv or .csv.gz (lists are JSON in a CSV); it is there whole
            or not at all. None: return a table.
        nodes: "all", "unlabelled", a split ("train", "val" or "test"), or a file of ids, one a
            line, or a table with a column ``id``, or only one column.
        embeddings: Add the column ``embedding``, the input of the model's last layer. Of a task on
            edges, write the rows of nodes by which edges are scored, and nothing else: ``id`` and
            ``embedding``, with ``type`` where the two ends are of two types.
        top: Show so many of the most probable classes instead of all; of links, find so many for
            each node, 10 by default.
        pairs: Of link prediction, a table of pairs of ids with the columns ``source`` and
            ``target``, which are to be scored; of several relations also ``relation``.
        relations: Of link prediction, names between commas of the relations in which the best links
            are looked for; None: all that were learnt.
        device: As in training.
        memory: What a worker may take, a text such as "2GiB" or a number of bytes: features stay in
            the files of the partition, and the network goes layer by layer through files in the
            folder of ``out`` or, without, of the partition. None: all of it is in memory.
        timeout: Seconds that a wait for another worker may take.

    Returns:
        The path, or without ``out`` a table: of all rows, or on ranks of those of this rank.

    Raises:
        ValueError: Run, partition and arguments do not fit each other; says what differs.
        PartitionFormatError: The partition is missing or damaged.
        CheckpointError: The rows of embeddings are damaged, or are of other nodes.
        RankError: A worker failed.

    Example:
        >>> predict("parts/g.json", "runs/1", nodes="unlabelled")  # doctest: +SKIP
    """
    request = PredictRequest(data=data, run=run, out=out, **options)  # type: ignore[arg-type]
    if is_initialized():
        table = predict_on_rank(request)
        return table if out is None else Path(out)
    num_parts = read_config(request.data).num_parts
    if num_parts == 1:
        table = predict_on_rank(request)
        return table if out is None else Path(out)
    if out is not None:
        launch_prediction(request, num_parts)
        return Path(out)
    import pyarrow.parquet

    with TemporaryFolder() as folder:
        path = folder / "predictions.parquet"
        launch_prediction(dataclasses.replace(request, out=str(path)), num_parts)
        return pyarrow.parquet.read_table(path, memory_map=False)


def launch_prediction(
    request: PredictRequest,
    num_workers: int,
    *,
    on_stderr: Callable[[str], None] | None = None,
) -> int:
    """Predict by local workers that are started, watched and ended here; the number of rows.

    Raises:
        ValueError: Run and partition do not fit each other.
        RankError: A worker failed.
    """
    from .launch import launch_workers

    assert request.out is not None
    card = read_card(request.run)  # workers would say the same, later
    check_num_workers(_config_of(card, request), read_config(request.data).num_parts, num_workers)
    choose_device(request.device)
    counts: list[int] = []
    outcome = launch_workers(
        [sys.executable, "-m", "graphshard.train.launch", request.to_json()],
        num_workers,
        timeout=request.timeout,
        on_event=lambda event: counts.append(int(event["rows"])),
        on_stderr=on_stderr,
    )
    if outcome.exit_code:
        remove_abandoned(Path(request.out).parent)
    outcome.check()
    return counts[0]


def prediction_work(
    request: PredictRequest, on_rows: Callable[[int], None] | None = None
) -> Callable[[], None]:
    """Set up this process, one rank of a launcher's or torchrun's, and return its work.

    Args:
        on_rows: Called on rank 0 with the number of rows; by default the launcher is told.
    """
    from .launch import join_ranks, send_event

    join_ranks(request.device, request.timeout)
    job = _Prediction(request)

    def work() -> None:
        num_rows = job.write()
        if rank() == 0:
            (on_rows or (lambda count: send_event({"rows": count})))(num_rows)
        barrier()
        shutdown_comms()

    return work


def predict_on_rank(request: PredictRequest) -> pa.Table:
    """Write what was asked for, if there is a place for it, or return this rank's rows."""
    job = _Prediction(request)
    if request.out is not None:
        job.write()
        return None
    import pyarrow as pa

    batches = list(job.batches())
    table = pa.Table.from_batches(batches, job.schema)
    return table.drop_columns([ROW])


def _config_of(card: ModelCard, request: PredictRequest) -> ResolvedConfig:
    given: dict[str, Any] = {"data": request.data, "device": request.device}
    given |= {"timeout": request.timeout, "class_weights": None}
    if card.config.get("memory") is not None or request.memory is not None:
        given |= {"memory": request.memory}
    if request.memory is None:
        return card.resolved_config(**given)
    return card.sampled_config(cache_bytes=0, run=_folder_of(request), **given)


def _folder_of(request: PredictRequest) -> str | None:
    """Where files of rows may be besides those of the partition."""
    return None if request.out is None else str(Path(request.out).absolute().parent)


class _Prediction:
    """A prediction that has been computed, on this rank, and not been written yet; collective."""

    def __init__(self, request: PredictRequest) -> None:
        self.request, memory = request, PeakMemory()
        with shared_errors():
            card = read_card(request.run)
            config = _config_of(card, request)
            _check_request(request, card)
        if is_initialized():
            agree(request.to_json(), "what is to be predicted")
            agree(json.dumps(card.weights), f"the model in {request.run}")
        with torch.random.fork_rng(devices=generators_of(config.device)):
            shard = _load(card, config, request.nodes)
            learner = Learner(shard, config)
        with shared_errors():
            learner.model.load_state_dict(card.read_weights())
        _load_rows(card, learner)
        is_plain = not shard.is_typed
        if config.model in NEED_IN_EDGES and is_plain and learner.graph.any_zero_in_degree():
            raise ValueError(
                f"{config.model} needs every node to have an in-edge, and some have none; "
                "partition the graph again with self loops (graphshard partition --self-loops)"
            )
        learner.model.eval()
        if isinstance(config, ResolvedSampledConfig) and request.memory is not None:
            learner.evaluates = _rows_by_layers(learner, config, memory)
        with torch.no_grad():
            self.rows = _rows_of_task(request, card, learner)
        self.schema = self._batch(slice(0, 0)).schema

    def _batch(self, places: slice) -> pa.RecordBatch:
        import pyarrow as pa

        numbers = pa.array(self.rows.numbers[places].contiguous().numpy())
        return pa.RecordBatch.from_pydict({ROW: numbers, **self.rows.columns(places)})

    def batches(self) -> Iterator[pa.RecordBatch]:
        """This rank's rows, some at a time, in the order of their numbers."""
        for start in range(0, self.rows.numbers.numel(), _ROWS_AT_ONCE):
            yield self._batch(slice(start, start + _ROWS_AT_ONCE))

    def write(self) -> int:
        """Write the rows of all ranks to one file; returns their number. Collective."""
        assert self.request.out is not None
        write_merged(self.batches(), self.schema, Path(self.request.out))
        return reduce_ints([self.rows.numbers.numel()])[0]


def _rows_by_layers(
    learner: Learner, config: ResolvedSampledConfig, memory: PeakMemory
) -> LayerwiseRows:
    """What computes the network's rows within a budget; collective.

    Raises:
        ValueError: It needs more; on all ranks.
    """
    shard, budget = learner._host, config.memory_bytes
    assert budget is not None
    if not isinstance(learner.network, LayeredNetwork):
        raise ValueError(
            f"memory needs a network that is computed layer by layer (got {config.model}, which "
            "lacks one of first_rows, layer_rows and last_rows); give it these methods, leave "
            "memory out, or partition into more parts"
        )
    planned, batches = RunPlanner(learner, shard, config, memory).evaluations()
    with shared_errors():
        room_beside(planned, budget, "")
    for module in learner.model.modules():
        allow = getattr(module, "set_allow_zero_in_degree", None)
        if callable(allow):  # the graph was looked at
            allow(True)
    inputs = SampledInputs(shard, learner, config.model)
    return LayerwiseRows(shard, learner, inputs, config, inputs.store_in_files(config), batches)


@dataclass(frozen=True)
class PredictedRows:
    """What this rank has predicted.

    Args:
        numbers: int64 ``[n]``, ascending: the place of each row among those of all ranks.
        columns: Makes the columns of some of the rows.
    """

    numbers: Tensor
    columns: Callable[[slice], dict[str, pa.Array]]


def _is_of_edges(kind: str) -> bool:
    return not kind.startswith("node")


def _check_request(request: PredictRequest, card: ModelCard) -> None:
    """Whether what is asked for is something that the model predicts."""
    kind, is_file = card.task["kind"], request.nodes not in CHOICES
    if request.pairs is not None and kind != LINK_PREDICTION:
        raise ValueError(f"pairs is for link prediction (got a model of {kind}); leave it out")
    if request.relations is not None and (kind != LINK_PREDICTION or request.embeddings):
        raise ValueError(
            f"relations is for the best links of nodes (got relations={request.relations!r}); "
            "leave it out"
        )
    if request.pairs is not None and request.relations is not None:
        raise ValueError("relations says which links to look for; leave out pairs")
    if request.pairs is not None and (request.top is not None or request.nodes != ALL):
        raise ValueError("top and nodes say for which nodes to look for links; leave out pairs")
    if kind == LINK_PREDICTION and not is_file and request.nodes != ALL:
        raise ValueError(f"nodes must be all or a file of ids for {kind} (got {request.nodes})")
    if _is_of_edges(kind) and kind != LINK_PREDICTION and is_file:
        raise ValueError(
            f"nodes must be one of {', '.join(CHOICES)}, of edges, for {kind} (got {request.nodes})"
        )
    if _is_of_edges(kind) and request.embeddings and (request.pairs, request.top) != (None, None):
        raise ValueError(f"embeddings of {kind} are rows of nodes; leave out pairs and top")
    if _is_of_edges(kind) and request.embeddings and request.nodes != ALL:
        raise ValueError(f"embeddings of {kind} are of all nodes (got nodes={request.nodes})")
    if kind != LINK_PREDICTION:
        columns_of(card, request.top)


def _rows_of_task(request: PredictRequest, card: ModelCard, learner: Learner) -> PredictedRows:
    """Compute what was asked for; collective."""
    if request.embeddings and learner._shard.edges is not None:
        return _rows_of_ends(request, learner)
    if learner.links is not None:
        return _links(request, learner)
    if learner._shard.edges is not None:
        return _edges(request, card, learner)
    return _nodes(request, card, learner)


def _nodes(request: PredictRequest, card: ModelCard, learner: Learner) -> PredictedRows:
    shard = learner._host
    with shared_errors():
        ids = user_ids_of(shard, shard.target, request.data)
    rows = _chosen(request.nodes, shard, ids)
    scores, embeddings_of = _scores_and_embeddings(learner, request.embeddings)
    make = columns_of(card, request.top)

    def columns(places: slice) -> dict[str, pa.Array]:
        import pyarrow as pa

        some = rows[places]
        predictions = shard.task.predictions(scores[some.to(scores.device)]).cpu()
        made = {"id": ids.take(pa.array(some.numpy())), **make(predictions)}
        if embeddings_of is not None:
            made["embedding"] = _vectors(embeddings_of(some.to(scores.device)).cpu())
        return made

    return PredictedRows(shard.original_ids[shard.target][rows].long(), columns)


def _scores_and_embeddings(
    learner: Learner, wanted: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Scores of this rank's nodes, and if wanted what gives embeddings of some; collective."""
    target = learner._shard.target
    if wanted and isinstance(learner.evaluates, LayerwiseRows):
        _check_num_layers(learner.model)
        if not isinstance(learner.network, NodeClassifier):
            raise ValueError(
                "embeddings of a model of your own are computed in memory (got memory="
                f"{learner._config.memory}); leave memory or embeddings out"
            )
        return learner.evaluates.scores_and_inputs()
    with _last_inputs(learner.model, wanted) as inputs:
        scores = learner.scores()
    if not wanted:
        return scores, None
    embeddings = _rows_of(inputs, target)
    return scores, lambda some: embeddings[some]


def _ends(request: PredictRequest, shard: TrainingShard) -> Ends:
    assert shard.edges is not None
    ntypes = shard.edges.node_types
    with shared_errors():
        ids = {ntype: user_ids_of(shard, ntype, request.data) for ntype in ntypes}
    return Ends(shard.edges.relations, ids, {t: shard.data.node_map(t) for t in ntypes})


def _rows_of_ends(request: PredictRequest, learner: Learner) -> PredictedRows:
    """What a network gives to the nodes at the ends of edges, by which it scores these."""
    shard = learner._host
    ends, rows = _ends(request, shard), learner.exact_rows()
    numbers, ids, orders, names, before = [], [], {}, [], 0
    for ntype, of_type in ends.ids.items():
        order = torch.argsort(shard.original_ids[ntype])
        numbers.append(before + shard.original_ids[ntype][order].long())
        ids.append(of_type.take(_arrow(order)))
        orders[ntype] = order.to(rows[ntype].device)
        names += [ntype] * len(order)
        before += shard.num_all[ntype]
    all_ids = joined_ids(ids)

    def columns(places: slice) -> dict[str, pa.Array]:
        import pyarrow as pa

        start, stop, _ = places.indices(len(all_ids))
        vectors = []
        for ntype, order in orders.items():
            vectors.append(rows[ntype][order[max(0, start) : max(0, stop)]].cpu())
            start, stop = start - len(order), stop - len(order)
        made = {"id": all_ids[places], "embedding": _vectors(torch.cat(vectors))}
        if len(ids) == 1:
            return made
        return {"type": pa.array(names[places], pa.string()), **made}

    return PredictedRows(torch.cat(numbers), columns)


def _arrow(numbers: Tensor) -> pa.Array:
    """A tensor as an Arrow array."""
    import pyarrow as pa

    return pa.array(numbers.contiguous().numpy())


def _edges(request: PredictRequest, card: ModelCard, learner: Learner) -> PredictedRows:
    shard = learner._host
    edges = shard.edges
    assert edges is not None
    ends = _ends(request, shard)
    pieces = learner.edge_scores_in_pieces(_ROWS_AT_ONCE)
    predictions = torch.cat([shard.task.predictions(scores).cpu() for scores in pieces])
    numbers, before = torch.zeros_like(edges.src), 0
    for etype, places in edges.by_relation():
        ids = shard.data.edge_features[f"{etype_key(etype)}/orig_id"].long()
        numbers[places] = before + ids[edges.index[places]]
        before += reduce_ints([int(ids.max()) + 1 if ids.numel() else 0], "max")[0]
    order = torch.argsort(numbers)
    sources, targets = (ends.ids_of(edges, side) for side in (0, 1))
    make = columns_of(card, request.top)
    names = list(map(etype_key, edges.relations))

    def columns(places: slice) -> dict[str, pa.Array]:
        import pyarrow as pa

        rows = order[places]
        made = {"source": sources.take(_arrow(rows)), "target": targets.take(_arrow(rows))}
        if len(names) > 1:
            made["relation"] = pa.array(names).take(_arrow(edges.number[rows]))
        return {**made, **make(predictions[rows])}

    return PredictedRows(numbers[order], columns)


def _links(request: PredictRequest, learner: Learner) -> PredictedRows:
    shard, predictor = learner._shard, learner.model.predictor
    assert isinstance(predictor, LinkPredictor) and shard.links is not None
    scores = LinkScores(_ends(request, learner._host), learner.exact_rows(), predictor, shard)
    if request.pairs is not None:
        found = scores.of_pairs(request.pairs)
    else:
        chosen = {}
        for ntype in dict.fromkeys(etype[0] for etype in scores.ends.relations):
            chosen[ntype] = torch.argsort(shard.original_ids[ntype].cpu())
        if request.nodes != ALL:
            is_in = _in_file(request.nodes, {t: scores.ends.ids[t] for t in chosen})
            chosen = {ntype: rows[is_in[ntype][rows]] for ntype, rows in chosen.items()}
        found = scores.best(request.top or DEFAULT_TOP_LINKS, chosen, request.relations)

    def columns(places: slice) -> dict[str, pa.Array]:
        count = len(range(*places.indices(found.numbers.numel())))
        return {name: column.slice(places.start, count) for name, column in found.columns.items()}

    return PredictedRows(found.numbers, columns)


# ------------------------------------------------------------------ loading


_TASKS: dict[Any, Any] = {kind.__name__: kind for kind in (Classes, SeveralLabels, Values, Links)}


def task_of_scores(card: ModelCard) -> Task:
    """What the scores of a model mean."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in card.scores.items()}
    task: Task = _TASKS[values.pop("task")](**values)
    return task


def _load(card: ModelCard, config: ResolvedConfig, nodes: str) -> TrainingShard:
    """Read this rank's part, labelled or not, and check that the model fits it; collective."""
    error: Exception | None = None
    shard: TrainingShard | None = None
    try:
        stays = config.memory_bytes is not None
        data = load_dgl_partition_data(config.data, rank(), checksums=True, leave_features=stays)
        check_num_workers(config, data.num_parts, world_size())
        _raise_differences(card, config, _listed("node types", card.node_types, _ntypes(data)))
        shard = _shard_of(card, config, data, read_task(config.data), nodes)
    except Exception as caught:
        error = caught
    if is_initialized():
        agree_on_build(None if shard is None else shard.data.build, error, None)
    elif error is not None:
        raise error
    assert shard is not None
    if card.task["kind"] == LINK_PREDICTION:
        shard = _without_held_out(shard, config)
    shard = _with_edges_added(shard, config)
    with shared_errors():
        _raise_differences(card, config, differences(card, shard))
    return shard


def _ntypes(data: PartitionData) -> tuple[str, ...]:
    return tuple(data.node_type_names)


def _raise_differences(card: ModelCard, config: ResolvedConfig, found: Iterable[str]) -> None:
    lines = list(found)
    if lines:
        raise ValueError(
            f"{config.data} does not fit the model in {card.folder}: {'; '.join(lines[:5])}"
            + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")
            + "; partition with --encodings-from the partition of training"
        )


def _shard_of(
    card: ModelCard, config: ResolvedConfig, data: PartitionData, task: TaskInfo, nodes: str
) -> TrainingShard:
    """A shard to predict on: without splits, and of a task on edges with those that are asked for.

    Args:
        task: What the partition says, of which classes and schema are held against the card.
    """
    relation = _relation(data, config, card.task["kind"] == LINK_PREDICTION)
    if relation is not None and relation[0].numel():
        top = int(relation[0].max()) + 1
        if top > card.num_relations:
            raise ValueError(
                f"{config.data} has the relation number {top - 1}, and the model of {card.folder} "
                f"knows {card.num_relations} relations; number them as in training"
            )
    trained = dataclasses.replace(
        task,
        **{key: _tuples(card.task.get(key)) for key in ("kind", "target", "reverse_of")},
    )
    owned = []
    for etype in trained.targets:
        if etype not in data.edges:
            raise ValueError(f"{config.data} has no relation {etype}, which the model predicts")
        fields, key, count = data.edge_features, etype_key(etype), data.edges[etype].num_edges
        none = torch.zeros(count, dtype=torch.bool)
        label = fields.get(f"{key}/label", torch.full((count,), -1))
        masks = {split: fields.get(f"{key}/{split}_mask", none).bool() for split in SPLITS}
        if trained.kind != LINK_PREDICTION:
            masks = {ALL: _asked(nodes, label, masks)}
        owned.append(
            TaskRows(etype, label, {s: mask.nonzero().view(-1) for s, mask in masks.items()})
        )
    if not trained.targets:
        none = torch.full((data.num_owned(card.target),), -1)
        label = data.node_features.get(f"{card.target}/label", none)
        owned.append(TaskRows(card.target, label, {}))
    return assemble(
        data,
        trained,
        config,
        owned,
        task=task_of_scores(card),
        num_classes=card.num_classes,
        num_relations=card.num_relations,
        class_names=(),
        category_counts={t: tuple(counts) for t, counts in card.category_counts.items()},
        edge_category_counts={t: tuple(c) for t, c in card.edge_category_counts.items()},
        sparse_counts=card.sparse_counts,
    )


def _tuples(value: Any) -> Any:
    """What JSON has made lists of."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _asked(nodes: str, label: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
    """Which rows are asked for by a word: bool ``[n]``."""
    if nodes == UNLABELLED:
        return ~is_labelled(label)
    if nodes in masks:
        return masks[nodes]
    return torch.ones(label.shape[0], dtype=torch.bool)


def differences(card: ModelCard, shard: TrainingShard) -> Iterator[str]:
    """What of a partition is not as it was in training, a sentence each."""
    etypes = shard.data.canonical_etypes
    yield from _listed("relations", [*map(etype_key, card.relations)], [*map(etype_key, etypes)])
    widths = card.feature_widths, {t: rows.shape[1] for t, rows in shard.features.items()}
    edge_widths = {etype_key(e): rows.shape[1] for e, rows in shard.edge_features.items()}
    for trained, found in (widths, (card.edge_feature_widths, edge_widths)):
        for name in dict.fromkeys([*trained, *found]):
            if trained.get(name) != found.get(name):
                yield (
                    f"'{name}' had {_width(trained.get(name))} in training and has "
                    f"{_width(found.get(name))}"
                )
    columns = {t: numbers.shape[1] for t, numbers in shard.categories.items()}
    columns |= {etype_key(e): numbers.shape[1] for e, numbers in shard.edge_categories.items()}
    counts = {**card.category_counts, **card.edge_category_counts}
    for name in dict.fromkeys([*counts, *columns]):
        trained_count = len(counts.get(name, ()))
        if trained_count != columns.get(name, 0):
            yield (
                f"'{name}' had {trained_count} columns of categories in training and has "
                f"{columns.get(name, 0)}"
            )
    for ntype in {*card.sparse_counts} ^ {*shard.sparse}:
        is_sparse = ntype in shard.sparse
        yield (
            f"'{ntype}' {'has' if is_sparse else 'had'} sparse features (feat_columns) "
            f"{'here, and not in training' if is_sparse else 'in training, and has none here'}"
        )
    names, found_names = tuple(card.task.get("class_names") or ()), shard.task_info.class_names
    if names and found_names and names != found_names:
        yield f"the classes were {_few(names)} in training and are {_few(found_names)}"
    yield from _encoding_differences(card.task.get("schema") or {}, shard.task_info.schema or {})


def _width(width: int | None) -> str:
    return "no features" if width is None else f"{width} columns of features"


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:5])) + (f", ... ({len(names)})" if len(names) > 5 else "")


def _listed(what: str, trained: Sequence[str], found: Sequence[str]) -> Iterator[str]:
    if list(trained) != list(found):
        yield f"the {what} were {_few(trained)} in training and are {_few(found)}"


def _encoding_differences(trained: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the encodings of features in two schemas."""
    for kind in ("nodes", "edges") if trained and found else ():
        for name, table in trained.get(kind, {}).items():
            here = {
                e.get("column"): e for e in found.get(kind, {}).get(name, {}).get("features", ())
            }
            for encoding in table.get("features", ()):
                column = encoding.get("column")
                other = here.pop(column, None)
                if other is None:
                    yield f"the column '{column}' of '{name}' is missing"
                elif keys := [
                    key
                    for key in {**encoding, **other}
                    if key != "statistics_rows" and encoding.get(key) != other.get(key)
                ]:
                    key = keys[0]
                    yield (
                        f"the column '{column}' of '{name}' is encoded otherwise ({key} was "
                        f"{encoding.get(key)!r:.60} and is {other.get(key)!r:.60})"
                    )
            for column in here:
                yield f"the column '{column}' of '{name}' is new"


def _load_rows(card: ModelCard, learner: Learner) -> None:
    """Put the trained rows of embeddings in place; collective.

    Raises:
        ValueError: The nodes are others than in training.
    """
    module = learner.embeddings
    if not module.names:
        return
    digests = digest_of_ids(learner)
    if digests != card.ids_of_embeddings:
        ntypes = [t for t in digests if digests[t] != card.ids_of_embeddings.get(t)]
        raise ValueError(
            f"{learner._config.data} has other nodes of type {', '.join(map(repr, ntypes))} than "
            f"the model in {card.folder} was trained on, which has learnt a row of each node, "
            "since these have no features; give them features and train again, or predict on the "
            "graph of training"
        )
    with shared_errors():
        assert card.embeddings_folder is not None
        ids = [getattr(module, f"ids_{table}").cpu() for table in range(len(module.names))]
    tables = read_best_rows(card.folder / card.embeddings_folder, ids)
    with torch.no_grad():
        for parameter, rows in zip(module.rows, tables, strict=True):
            parameter.copy_(rows)


# ------------------------------------------------------------------ which rows


def is_labelled(label: Tensor) -> Tensor:
    """Which rows have a label: bool ``[n]``."""
    known = ~label.isnan() if label.is_floating_point() else label >= 0
    return known if known.ndim == 1 else known.all(1)


def _chosen(nodes: str, shard: TrainingShard, ids: pa.Array) -> Tensor:
    """Rows of this rank that are asked for, in the order of their original numbers; collective."""
    features, target = shard.data.node_features, shard.target
    original = shard.original_ids[target]
    chosen = torch.ones(original.numel(), dtype=torch.bool)
    if nodes == UNLABELLED:
        chosen = ~is_labelled(shard.label)
    elif nodes in SPLITS:
        with shared_errors():
            mask = features.get(f"{target}/{nodes}_mask")
            if mask is None:
                raise ValueError(
                    f"nodes={nodes} needs {nodes}_mask, which the nodes of type '{target}' in "
                    "this partition do not have; give all, unlabelled or a file of ids"
                )
            chosen = mask.bool()
    elif nodes != ALL:
        chosen = _in_file(nodes, {target: ids})[target]
    rows = chosen.nonzero().view(-1)
    return rows[torch.argsort(original[rows])]


def _in_file(path: str, ids: Mapping[str, pa.Array]) -> dict[str, Tensor]:
    """Node type to which of this rank's nodes a file names; collective.

    An id may be that of nodes of several types.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    chosen, here = {}, []
    with shared_errors():
        by_type = dict(zip(ids, alike(list(ids.values())), strict=True))
        asked, may_be_name = read_ids(path, next(iter(by_type.values())).type)
        for ntype, of_type in by_type.items():
            own, named = plain_ids(of_type), plain_ids(asked)
            found = pc.is_in(own, value_set=named).to_numpy(zero_copy_only=False)
            chosen[ntype] = torch.from_numpy(found.copy())
            here.append(pc.is_in(named, value_set=own).to_numpy(zero_copy_only=False))
    counts = reduce_ints(np.sum(here, axis=0).tolist()) if len(asked) else []
    missing = [number for number, count in enumerate(counts) if not count]
    if may_be_name and missing[:1] == [0]:  # of a file that names its column
        del missing[0]
    if missing:
        few = ", ".join(str(value) for value in asked.take(pa.array(missing[:10])).to_pylist())
        raise ValueError(
            f"{shown(path)} names {len(missing)} of {len(asked)} ids that are not in the graph "
            f"({few}"
            f"{', ...' if len(missing) > 10 else ''}); leave them out, or partition a graph with "
            "them"
        )
    return chosen


# ------------------------------------------------------------------ columns


class PredictionColumns(Protocol):
    """Makes columns of predictions, rows ``[n, width]``: probabilities, or values."""

    def __call__(self, predictions: Tensor) -> dict[str, pa.Array]: ...


def columns_of(card: ModelCard, top: int | None) -> PredictionColumns:
    """The columns of a model's predictions.

    Raises:
        ValueError: ``top`` is given, and the model does not choose one class of several.
    """
    task = card.scores["task"]
    if top is not None and task != "Classes":
        raise ValueError(
            f"top is for one class of several per row (got top={top}, and the task is "
            f"{card.task['kind']}); leave it out"
        )
    if task == "Values":
        return _value_columns
    content = (card.task.get("schema") or {}).get("label")
    labels = Labels.of_json(content) if content else None
    names = tuple(card.task.get("class_names") or map(str, range(card.num_classes)))
    if task == "SeveralLabels":
        return SetColumns(names, labels)
    return ClassColumns(names, labels, top)


class ClassColumns:
    """Columns of one class of several: the class by name, and the probability of each.

    Args:
        names: Of the classes, in the order of the scores.
        labels: How classes were read from a table, whose type they then have; None: they are
            names, or numbers where these are the names.
        top: Show so many of the most probable classes; None: all, or 5 of more than 100.
    """

    def __init__(self, names: Sequence[str], labels: Labels | None, top: int | None) -> None:
        self.values = _class_values(names, labels)
        self.names = names
        if top is None and len(names) > MOST_COLUMNS:
            top = DEFAULT_TOP
        self.top = None if top is None else min(top, len(names))

    def __call__(self, predictions: Tensor) -> dict[str, pa.Array]:
        import pyarrow as pa

        columns = {"prediction": self._classes(predictions.argmax(1))}
        if self.top is None:
            return columns | _probabilities(self.names, predictions)
        # Of equal probabilities the class that comes first is the first.
        shares, order = torch.sort(predictions, dim=1, descending=True, stable=True)
        for place in range(self.top):
            columns[f"class_{place + 1}"] = self._classes(order[:, place])
            columns[f"p_{place + 1}"] = pa.array(shares[:, place].contiguous().numpy())
        return columns

    def _classes(self, numbers: Tensor) -> pa.Array:
        import pyarrow as pa

        return self.values.take(pa.array(numbers.contiguous().numpy()))


class SetColumns:
    """Columns of several classes a row: those of probability above 0.5, and that of each."""

    def __init__(self, names: Sequence[str], labels: Labels | None) -> None:
        self.values = _class_values(names, labels)
        self.names = names

    def __call__(self, predictions: Tensor) -> dict[str, pa.Array]:
        import pyarrow as pa

        is_chosen = predictions > 0.5
        counts = is_chosen.sum(1).cumsum(0, dtype=torch.int32)
        offsets = torch.cat([counts.new_zeros(1), counts])
        chosen = self.values.take(pa.array(is_chosen.nonzero()[:, 1].contiguous().numpy()))
        sets = pa.ListArray.from_arrays(pa.array(offsets.numpy()), chosen)
        return {"prediction": sets, **_probabilities(self.names, predictions)}


def _class_values(names: Sequence[str], labels: Labels | None) -> pa.Array:
    """The classes as they are shown in predictions, by number."""
    import pyarrow as pa

    if labels is not None and labels.is_multilabel:
        return labels.decode(np.eye(len(names), dtype=np.int64)).flatten()
    if labels is not None:
        return labels.decode(np.arange(len(names)))
    numbers = list(range(len(names)))
    return pa.array(numbers if list(map(str, numbers)) == list(names) else list(names))


def _probabilities(names: Sequence[str], predictions: Tensor) -> dict[str, pa.Array]:
    """A column for each class."""
    import pyarrow as pa

    by_class = predictions.t().contiguous().numpy()
    return {f"p_{name}": pa.array(row) for name, row in zip(names, by_class, strict=True)}


def _value_columns(predictions: Tensor) -> dict[str, pa.Array]:
    """Columns of real values: one, or one for each target."""
    import pyarrow as pa

    values = predictions.t().contiguous().numpy()
    if len(values) == 1:
        return {"prediction": pa.array(values[0])}
    return {f"prediction_{number}": pa.array(row) for number, row in enumerate(values)}


def _vectors(rows: Tensor) -> pa.Array:
    """A column of vectors, float32 at least."""
    import pyarrow as pa

    wide = rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()
    return pa.FixedSizeListArray.from_arrays(pa.array(wide.view(-1).numpy()), rows.shape[1])


@contextlib.contextmanager
def _last_inputs(model: nn.Module, wanted: bool) -> Iterator[list[Any]]:
    """What goes into the last layer of a model while this is open, layers' rows at the end."""
    inputs: list[Any] = []
    if not wanted:
        yield inputs
        return
    handle = _check_num_layers(model)[-1].register_forward_pre_hook(
        lambda _, args: inputs.append(args[1])
    )
    try:
        yield inputs
    finally:
        handle.remove()


def _check_num_layers(model: nn.Module) -> nn.ModuleList:
    """The layers of a model that has several."""
    layers = getattr(model, "layers", None)
    if isinstance(layers, nn.ModuleList) and len(layers) > 1:
        return layers
    raise ValueError(
        "embeddings are the input of the last of several layers, and this model has "
        f"{len(layers) if isinstance(layers, nn.ModuleList) else 'no list named'} layers; "
        "leave embeddings out"
    )


def _rows_of(inputs: Sequence[Any], target: str) -> Tensor:
    (rows,) = inputs
    chosen: Tensor = rows[target] if isinstance(rows, Mapping) else rows
    return chosen
