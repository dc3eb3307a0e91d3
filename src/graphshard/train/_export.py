# SPDX-License-Identifier: Apache-2.0
r"""The model that leaves a run: plain weights, and a card that says how to build it.

``export_run`` writes, and ``read_card`` reads::

    runs/1/
    ├── model.safetensors   state_dict of the best model, names as in the module: "layers.0.weight"
    ├── model.json          the card, see `ModelCard`; written last, with the digest of the weights
    └── best/epoch-...      rows of embeddings by original id, where the model has any: a checkpoint

Embeddings of nodes are not in the weights: each rank holds those of its own nodes. They are written
as checkpoints are, so that a partition into another number of parts finds its rows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from .._base.files import read_json_regular, sync_folder, write_json
from .._base.version import VERSION
from ..comm import rank
from ..comm.collectives import reduce_ints, shared_errors
from ..errors import PartitionFormatError
from ..ops.counter_random import GAMMA, mix
from ..partition.checked_files import TensorFile, digest_of, write_tensors
from ..partition.format import digest_of_content, etype_key
from ._checkpoint import EPOCHS, Checkpoint, CheckpointFolder
from ._config import ResolvedConfig, ResolvedFullBatchConfig, ResolvedSampledConfig
from ._result import History
from ._training_shard import TrainingShard

if TYPE_CHECKING:
    import pyarrow as pa

    from ._learner import Learner

FORMAT, FORMAT_VERSION = "graphshard-model", 1
WEIGHTS, CARD, ROWS_OF_BEST = "model.safetensors", "model.json", "best"

_NOT_OF_THE_MODEL = frozenset(
    "data device timeout save_every checkpoint_dir resume run plot tensorboard".split()
)
_IDS_AT_ONCE = 1 << 16

_Config = TypeVar("_Config", bound=ResolvedConfig)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """How a model is built, what it was trained on, and how well it did.

    Args:
        mode: "full" or "sample".
        config: All settings of the run, none of them open.
        task: What `graphshard.train.TaskInfo` says: the classes, the schema with its encodings.
        target: Node type that is predicted; of a task on edges that of the destinations.
        scores: What the columns of the scores mean: the task, their width, of values the mean and
            deviation that turn scores into them.
        num_classes: Columns of the scores of a classifier.
        relations: In the order in which typed models number them.
        feature_widths: Node type to the width of its features; those without have embeddings.
        edge_feature_widths: Likewise of edges, by relation, "source:name:destination".
        category_counts: Node type to the number of values of each of its columns of categories,
            which have tables of learnt rows.
        edge_category_counts: Likewise of edges, by relation.
        sparse_counts: Node type to the number of columns of its sparse features, plus 1. What they
            are times ``category_tables.matrices.N.weight``, N of these types, goes into the layers.
        num_nodes: Node type to the number of nodes that the model was trained on.
        embeddings: Name of each table of embeddings to its width; empty where there are none.
        embeddings_folder: Of the checkpoint with their rows, inside the run's folder.
        ids_of_embeddings: Node type whose nodes have such rows to `digest_of_ids` of its nodes.
        layers: Name of each layer in the module to what it is.
        parameters: Name of each tensor in the weights to its dtype and shape.
        weights: Name, bytes and digest of the file of the weights.
        best: Evaluation of this model; ``last``: of the last epoch.
    """

    mode: str
    config: dict[str, Any]
    task: dict[str, Any]
    target: Any
    scores: dict[str, Any]
    num_classes: int
    num_relations: int
    node_types: tuple[str, ...]
    relations: tuple[tuple[str, str, str], ...]
    feature_widths: dict[str, int]
    edge_feature_widths: dict[str, int]
    category_counts: dict[str, Any]
    num_nodes: dict[str, int]
    embeddings: dict[str, int]
    embeddings_folder: str | None
    ids_of_embeddings: dict[str, int]
    layers: dict[str, str]
    parameters: dict[str, dict[str, Any]]
    weights: dict[str, Any]
    best: dict[str, Any]
    last: dict[str, Any]
    versions: dict[str, str]
    edge_category_counts: dict[str, Any] = field(default_factory=dict)
    sparse_counts: dict[str, int] = field(default_factory=dict)
    folder: Path = field(default=Path(), compare=False)

    def resolved_config(self, **values: Any) -> ResolvedConfig:
        """The run's settings with some replaced."""
        kind = {"full": ResolvedFullBatchConfig, "sample": ResolvedSampledConfig}[self.mode]
        return self._config(kind, values)

    def sampled_config(self, **values: Any) -> ResolvedSampledConfig:
        """The same as those of a sampled run."""
        return self._config(ResolvedSampledConfig, values)

    def _config(self, kind: type[_Config], values: Mapping[str, Any]) -> _Config:
        names = {f.name for f in dataclasses.fields(kind)}
        known = {name: value for name, value in self.config.items() if name in names}
        if "fanouts" in names:
            known["fanouts"] = tuple(known.get("fanouts") or (-1,) * known["layers"])
        return kind(**{**known, **values})

    def read_weights(self) -> dict[str, Tensor]:
        """The ``state_dict``, every byte of it held against the card.

        Raises:
            ValueError: The file is not the one that was written with the card.
        """
        path = self.folder / str(self.weights["file"])
        if not path.is_file():
            raise ValueError(f"{path} is missing, which belongs to {CARD} beside it; train again")
        try:
            why = "" if digest_of(path) == self.weights["blake2b"] else "its digest differs"
        except PartitionFormatError:  # whose cure is that of a part
            why = "it is damaged or incomplete"
        if why:
            raise ValueError(f"{path} does not belong to {CARD} beside it: {why}; train again")
        return {name: value.clone() for name, value in TensorFile.open(path).read().items()}


def export_run(learner: Learner, folder: str | os.PathLike[str], history: History) -> None:
    """Write the best model of a run into its folder; collective.

    Args:
        learner: The run's `Learner`, which has kept its best model.
        history: With the evaluation of that model.
    """
    folder = Path(folder)
    if learner.best is None:  # resumed at an epoch without an evaluation, with nothing to train
        learner.keep()
        assert learner.best is not None
    state, rows = learner.best
    with shared_errors():
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CARD).unlink(missing_ok=True)  # until the new one is whole there is no model
    rows_folder = None
    if num_tables := len(learner.embeddings.names):
        rows_folder = _save_rows(folder / ROWS_OF_BEST, state, rows, num_tables, history)
    ids = digest_of_ids(learner)
    with shared_errors():
        if rank() == 0:
            with _replacing(folder / WEIGHTS) as partial:
                record = write_tensors(partial, state)
            weights = {"file": WEIGHTS, "bytes": record.bytes, "blake2b": record.blake2b}
            card = _card_of(learner, history, weights, rows_folder, ids)
            _write_card(folder / CARD, card)
            sync_folder(folder)


def _card_of(
    learner: Any,
    history: History,
    weights: dict[str, Any],
    rows_folder: str | None,
    ids: dict[str, int],
) -> ModelCard:
    shard: TrainingShard = learner._shard
    config: ResolvedConfig = learner._config
    tables = zip(learner.embeddings.names, learner.embeddings.rows, strict=True)
    assert history.best is not None and history.last is not None
    settings = dataclasses.asdict(config)
    return ModelCard(
        mode=config.mode,
        config={name: settings[name] for name in settings if name not in _NOT_OF_THE_MODEL},
        task=dataclasses.asdict(shard.task_info),
        target=shard.target,
        scores={"task": type(shard.task).__name__, **vars(shard.task)},
        num_classes=shard.num_classes,
        num_relations=shard.num_relations,
        node_types=tuple(shard.data.node_type_names),
        relations=tuple(shard.data.canonical_etypes),
        feature_widths={ntype: rows.shape[1] for ntype, rows in shard.features.items()},
        edge_feature_widths={
            etype_key(etype): rows.shape[1] for etype, rows in shard.edge_features.items()
        },
        category_counts={t: list(counts) for t, counts in shard.category_counts.items()},
        edge_category_counts={t: list(c) for t, c in shard.edge_category_counts.items()},
        sparse_counts=dict(shard.sparse_counts),
        num_nodes=dict(shard.num_all),
        embeddings={name: table.shape[1] for name, table in tables},
        embeddings_folder=rows_folder,
        ids_of_embeddings=ids,
        layers=_layers_of(learner.model),
        parameters={
            name: {"dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape]}
            for name, value in learner.best[0].items()
        },
        weights=weights,
        best=dataclasses.asdict(history.best),
        last=dataclasses.asdict(history.last),
        versions=_versions(),
    )


def _save_rows(
    folder: Path,
    state: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    num_tables: int,
    history: History,
) -> str:
    """Write the rows of embeddings by original id; returns the folder, seen from the run's."""
    with shared_errors():
        if rank() == 0:
            folder.mkdir(exist_ok=True)
    ids = [rows[f"ids_{table}"] for table in range(num_tables)]
    checkpoints = CheckpointFolder(folder, {}, ids)
    checkpoints.prepare(resume=True, write=True)
    try:
        shared = {f"best/{name}": value for name, value in state.items()}
        local = {f"best/{name}": value for name, value in rows.items()}
        checkpoints.save(Checkpoint(shared=shared, local=local, history=history))
        name = EPOCHS.name(history.epoch)
        with shared_errors():
            if rank() == 0:
                EPOCHS.remove_old(folder, 0, spared=(name,))
    finally:
        checkpoints.close()
    return f"{folder.name}/{name}"


def user_ids_of(shard: TrainingShard, ntype: str, path: str) -> pa.Array:
    """The user's ids of this rank's nodes of a type; original numbers where there are no tables."""
    import pyarrow as pa

    if shard.task_info.schema:
        from ..data.tables import user_ids

        ids = user_ids(path, shard.data.rank).get(ntype)
        if ids is not None:
            return ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
    return pa.array(shard.original_ids[ntype].numpy())


def digest_of_ids(learner: Learner) -> dict[str, int]:
    """A number for each node type with learnt rows, of its nodes' ids and numbers; collective.

    It does not depend on the partition: the sum of a hash of each node. Rows of another graph may
    have the same numbers, but not the same ids.
    """
    shard: TrainingShard = learner._shard
    names = learner.embeddings.names
    ntypes = [t for t in shard.data.node_type_names if t in names]
    if names and not ntypes:  # rows of relations and nodes, of the only type
        ntypes = list(shard.data.node_type_names)
    with shared_errors():
        numbers = [
            _sum_of_hashes(shard.original_ids[t], user_ids_of(shard, t, learner._config.data))
            for t in ntypes
        ]
    # In halves, so that sums over ranks fit 64 bits.
    halves = reduce_ints([half for number in numbers for half in divmod(number, 1 << 32)])
    sums = [(high << 32) + low for high, low in zip(halves[::2], halves[1::2], strict=True)]
    return {ntype: total % (1 << 64) for ntype, total in zip(ntypes, sums, strict=True)}


def _sum_of_hashes(numbers: Tensor, ids: pa.Array) -> int:
    total = 0
    for start in range(0, len(ids), _IDS_AT_ONCE):
        piece = ids[start : start + _IDS_AT_ONCE]
        rows = numbers[start : start + _IDS_AT_ONCE].long()
        hashes = mix(mix(rows + GAMMA) ^ _hashes(piece))
        total += int(hashes.sum())
    return total % (1 << 64)


def _hashes(ids: pa.Array) -> Tensor:
    """int64 ``[n]``: of each value, whatever its type; equal for equal bytes."""
    import pyarrow as pa

    if isinstance(ids, pa.ExtensionArray):
        ids = ids.storage
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if pa.types.is_integer(ids.type):
        return mix(torch.from_numpy(ids.cast(pa.int64(), safe=False).to_numpy().copy()))
    if not (pa.types.is_binary(ids.type) or pa.types.is_fixed_size_binary(ids.type)):
        ids = ids.cast(pa.large_string())
    values = pa.concat_arrays([ids.cast(pa.large_binary())])  # from its first byte on
    _, offset_bytes, content = values.buffers()
    ends = torch.frombuffer(bytearray(offset_bytes), dtype=torch.int64)[: len(values) + 1]
    ends = ends[values.offset :]
    if content is None or not content.size:
        return mix(ends.diff())
    letters = torch.frombuffer(bytearray(content), dtype=torch.uint8)[: int(ends[-1])].long()
    lengths = ends.diff()
    place = torch.arange(letters.numel()) - torch.repeat_interleave(ends[:-1], lengths)
    sums = torch.cat([letters.new_zeros(1), ((letters + 1) * mix(place + GAMMA)).cumsum(0)])
    return mix(sums[ends[1:]] - sums[ends[:-1]] + lengths)


def _layers_of(model: nn.Module) -> dict[str, str]:
    """What each layer is, on one line: ``"GraphConv(in=5, out=6, normalization=both)"``."""
    lists = [(n, m) for n, m in model.named_children() if isinstance(m, nn.ModuleList)]
    modules = [(f"{n}.{i}", layer) for n, layers in lists for i, layer in enumerate(layers)]
    listed = {name for name, _ in lists}
    modules += [(n, m) for n, m in model.named_children() if n not in listed]
    return {name: " ".join(repr(module).split()) for name, module in modules}


def _versions() -> dict[str, str]:
    return {
        "graphshard": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that then takes the place of ``path``, in one step."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write_card(path: Path, card: ModelCard) -> None:
    values = {f.name: getattr(card, f.name) for f in dataclasses.fields(card)}
    del values["folder"]
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **values}
    content = json.loads(json.dumps(content), parse_constant=str)  # JSON has no infinity
    content["digest"] = digest_of_content(content, "digest")
    with _replacing(path) as partial:
        write_json(partial, content, final=path)


def read_card(run: str | os.PathLike[str]) -> ModelCard:
    """Read the card of a run.

    Raises:
        ValueError: There is none in the folder, or it is not what a run writes.
    """
    folder = Path(run)
    path = folder / CARD
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; give the folder that --run named in training"
        )
    try:
        content = read_json_regular(path)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        version = content.pop("format", None), content.pop("format_version", None)
        if version != (FORMAT, FORMAT_VERSION):
            raise ValueError(
                f"its format is {version[0]} {version[1]}, and this version, {VERSION}, reads "
                f"{FORMAT} {FORMAT_VERSION}"
            )
        whole = {"format": version[0], "format_version": version[1], **content}
        if content.pop("digest", None) != digest_of_content(whole, "digest"):
            raise ValueError("it was changed after it was written: its digest differs")
        _check_fields(content)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {CARD}: no run has ended there; train with --run {folder} first"
        ) from None
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not the card of a model ({error}); train again, or predict with the "
            "version that trained"
        ) from None
    content["node_types"] = tuple(content["node_types"])
    content["relations"] = tuple(tuple(relation) for relation in content["relations"])
    if isinstance(content["target"], list):
        content["target"] = tuple(content["target"])
    return ModelCard(**content, folder=folder)


def _check_fields(content: Mapping[str, Any]) -> None:
    """Whether a card has the fields of this version; those with a default may be absent."""
    fields = [f for f in dataclasses.fields(ModelCard) if f.name != "folder"]
    names = {f.name for f in fields}
    needed = {
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    absent, unknown = sorted(needed - set(content)), sorted(set(content) - names)
    if not absent and not unknown:
        return
    versions = content.get("versions")
    writer = versions.get("graphshard", "?") if isinstance(versions, dict) else "?"
    what = f"lacks {absent[0]!r}" if absent else f"has {unknown[0]!r}"
    raise ValueError(f"graphshard {writer} wrote it, and it {what} for {VERSION}, which reads it")
