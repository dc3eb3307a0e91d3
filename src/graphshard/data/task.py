# SPDX-License-Identifier: Apache-2.0
"""TaskInfo: what a partition is to be trained for, kept in a small JSON beside it.

`partition_dataset` writes both: it is the way from a data set to a partition to train on.

``graphshard partition`` writes ``NAME.dataset.json`` next to ``NAME.json``. A partition that was
made by calling `graphshard.partition.partition_graph` has none; what it would say is then
derived from the features: the target is the node type that has labels, and the classes and
relations are counted.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.files import read_json_regular, write_json
from .._base.typing import CanonicalEType
from ..errors import PartitionFormatError
from ..partition.checked_files import listing, mapping, required, shown, text, whole_number
from ..partition.format import digest_of_content, read_config
from ..partition.save import partition_graph
from .dataset import SPLITS, DatasetArrays, NodeDataset

FORMAT = "graphshard-dataset"
FORMAT_VERSION = 3
_READ_VERSIONS = (2, FORMAT_VERSION)
TASK_KINDS = (
    "node classification",
    "node regression",
    "edge classification",
    "edge regression",
    "link prediction",
)
_MOST_CLASSES = 2**31


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """What a partitioned graph is to be trained for.

    Args:
        kind: One of `TASK_KINDS`.
        target: Node type that has labels; None: the one that has the feature ``label``. For tasks
            on edges, the relation, as three names, or several relations.
        num_classes: Number of classes; None: counted. None for regression and link prediction.
        num_relations: Number of values of the edge feature ``etype``; None: counted, or there is
            no such feature.
        class_names: As they are shown to users; their own type is in ``schema["label"]``.
        is_multilabel: Whether a node or edge may have several classes, or none.
        options: How the graph was prepared, for the reader.
        reverse_of: For tasks on edges, the relation with the reverse of each edge of the target
            (the target itself, where it has both directions), or None, where there is none; for
            several relations, such an entry for each.
        schema: Of a partition that was made from tables: columns of ids, encodings of features, and
            the label, by type; see `graphshard.data.partition_tables`.
        relation_names: Of the values of the edge feature ``etype``, as they are shown.

    Raises:
        ValueError: There is no such kind, or the target is not of it.
    """

    name: str
    kind: str = TASK_KINDS[0]
    target: str | CanonicalEType | tuple[CanonicalEType, ...] | None = None
    num_classes: int | None = None
    num_relations: int | None = None
    class_names: tuple[str, ...] = ()
    is_multilabel: bool = False
    options: dict[str, Any] | None = None
    reverse_of: CanonicalEType | tuple[CanonicalEType | None, ...] | None = None
    schema: dict[str, Any] | None = None
    relation_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in TASK_KINDS:
            raise ValueError(f"kind must be one of {', '.join(TASK_KINDS)} (got {self.kind!r})")
        if self.is_on_edges != isinstance(self.target, tuple) and (
            self.is_on_edges or self.target is not None
        ):
            of = "a relation, three names" if self.is_on_edges else "a node type"
            raise ValueError(f"the target of {self.kind} must be {of} (got {self.target!r})")
        if isinstance(self.target, tuple):
            if not self.targets or len({*self.targets}) < len(self.targets):
                raise ValueError(
                    f"the relations of {self.kind} must differ, and be one at least (got "
                    f"{self.target!r})"
                )
            if len(self.targets) == 1:
                object.__setattr__(self, "target", self.targets[0])
            if len(self.reverses) == 1:
                object.__setattr__(self, "reverse_of", self.reverses[0])
            if len(self.reverses) != len(self.targets):
                raise ValueError(
                    f"reverse_of must have an entry for each of {len(self.targets)} relations (got "
                    f"{self.reverse_of!r})"
                )

    @property
    def targets(self) -> tuple[CanonicalEType, ...]:
        """The relations of a task on edges; none of one on nodes."""
        if not isinstance(self.target, tuple):
            return ()
        is_one = bool(self.target) and isinstance(self.target[0], str)
        return (self.target,) if is_one else self.target  # type: ignore[return-value]

    @property
    def reverses(self) -> tuple[CanonicalEType | None, ...]:
        """For each of the targets the relation with its reverses, if there is one."""
        given = self.reverse_of
        if given is None:
            return (None,) * len(self.targets)
        is_one = bool(given) and isinstance(given[0], str)
        return (given,) if is_one else given  # type: ignore[return-value]

    @property
    def is_on_edges(self) -> bool:
        """Whether edges have labels, or are told from no edges."""
        return not self.kind.startswith("node")

    @classmethod
    def of_dataset(
        cls, dataset: NodeDataset | DatasetArrays, options: dict[str, Any] | None = None
    ) -> TaskInfo:
        """What there is to know about a data set."""
        if dataset.links:
            return cls(
                name=dataset.name,
                kind="link prediction",
                target=dataset.links,
                num_relations=len(dataset.relation_names) or None,
                options=options,
                reverse_of=dataset.reverse_of,
                relation_names=dataset.relation_names,
            )
        return cls(
            name=dataset.name,
            target=dataset.target,
            num_classes=dataset.num_classes,
            num_relations=len(dataset.relation_names) or None,
            class_names=dataset.class_names,
            is_multilabel=dataset.target_fields["label"].ndim > 1,
            options=options,
            relation_names=dataset.relation_names,
        )


def inverse_names(names: Sequence[str]) -> tuple[str, ...]:
    """What the inverses of relations are called."""
    return tuple(f"rev_{name}" for name in names)


def task_warnings(
    name: str, occurs: Sequence[bool], shared: Mapping[tuple[str, str], int]
) -> list[str]:
    """What can hardly be meant by labels and splits, a line each.

    Args:
        name: Of the data, for the lines.
        occurs: Whether each class has a node.
        shared: Two splits to the number of labelled nodes that are in both.
    """
    lines = []
    if absent := [number for number, is_there in enumerate(occurs) if not is_there]:
        few = ", ".join(map(str, absent[:3])) + (", ..." if len(absent) > 3 else "")
        lines.append(
            f"{name} has {len(occurs)} classes, of which {len(absent)} have no node ({few}), "
            "because classes are counted up to the largest label; number labels from 0 without "
            "gaps, as torch.unique(label, return_inverse=True) does"
        )
    elif len(occurs) == 1:
        lines.append(f"{name} has one class, so there is nothing to tell apart; check its labels")
    for (first, second), count in shared.items():
        if count:
            lines.append(
                f"{name} has {count} labelled nodes in both {first}_mask and {second}_mask, so "
                f"that accuracy on {second} nodes is of nodes seen before; make the masks disjoint"
            )
    return lines


def warn_of_task(dataset: NodeDataset | DatasetArrays) -> None:
    """Warn of what training on a data set would warn of."""
    if dataset.links:
        return
    fields = dataset.target_fields
    label = fields["label"]
    if label.ndim != 1:
        return
    is_labelled = label >= 0
    occurs = torch.zeros(dataset.num_classes, dtype=torch.bool)
    occurs[label[is_labelled].long().cpu()] = True
    shared = {}
    for first, second in itertools.combinations(SPLITS, 2):
        both = fields[f"{first}_mask"] & fields[f"{second}_mask"] & is_labelled
        shared[first, second] = int(both.sum())
    for line in task_warnings(dataset.name, occurs.tolist(), shared):
        warnings.warn(line, stacklevel=2)


def task_path(partition_json: str | os.PathLike[str]) -> Path:
    """Where the task of a partition is kept."""
    path = Path(partition_json)
    return path.with_name(f"{path.stem}.dataset.json")


def write_task(
    partition_json: str | os.PathLike[str],
    task: TaskInfo,
    id_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write the task of the partition that is there now, in one atomic step.

    Args:
        id_files: What `graphshard.data.id_files` has written of users' ids.
    """
    _write_task(task_path(partition_json), task, read_config(partition_json).build, id_files)


def _write_task(
    path: Path,
    task: TaskInfo,
    build: str | None,
    id_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    described = asdict(task)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "task": described.pop("kind"),
        "build": build,
        **described,
        "id_files": id_files or {},
    }
    content = json.loads(json.dumps(content, allow_nan=False))  # tuples have become lists
    content["digest"] = digest_of_content(content, "digest")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        write_json(partial, content, final=path)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_task(partition_json: str | os.PathLike[str]) -> TaskInfo:
    """Read the task of a partition; an open one if none was written for the partition there is.

    Raises:
        PartitionFormatError: The file is there and cannot be used.
    """
    content = read_task_content(partition_json)
    if content is None:
        return TaskInfo(name=Path(partition_json).stem)
    try:
        return _read(content)
    except ValueError as error:
        raise _undescribed(partition_json, error) from None


def read_task_content(partition_json: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """The JSON that describes the task of a partition; None where there is none of it.

    Raises:
        PartitionFormatError: The file is there and cannot be used.
    """
    path = task_path(partition_json)
    try:
        content = mapping(read_json_regular(path), "the JSON")
        version = required(content, "format"), required(content, "format_version")
        if version[0] != FORMAT or version[1] not in _READ_VERSIONS:
            raise ValueError(f"format {shown(version[0])} {shown(version[1])}")
        if required(content, "digest") != digest_of_content(content, "digest"):
            raise ValueError("it was changed after it was written: its digest differs")
        if required(content, "build") != read_config(partition_json).build:
            return None  # left over from another partition of the same name
        return content
    except PartitionFormatError:
        raise
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise _undescribed(partition_json, error) from None


def _undescribed(
    partition_json: str | os.PathLike[str], error: ValueError | OSError
) -> PartitionFormatError:
    why = error.strerror if isinstance(error, OSError) else error
    return PartitionFormatError(
        f"{task_path(partition_json)} does not describe a task ({why}); partition the graph again, "
        "or remove the file to have the task derived from the features"
    )


def _read(content: Mapping[str, Any]) -> TaskInfo:
    target, options = required(content, "target"), required(content, "options")
    names = listing(required(content, "class_names"), "names")
    more: dict[str, Any] = {}
    if content["format_version"] != 2:
        reverse_of, schema = required(content, "reverse_of"), required(content, "schema")
        is_multilabel = required(content, "is_multilabel")
        if not isinstance(is_multilabel, bool):
            raise ValueError(f"is_multilabel must be true or false (got {shown(is_multilabel)})")
        more = {
            "is_multilabel": is_multilabel,
            "reverse_of": None if reverse_of is None else _relations(reverse_of),
            "schema": None if schema is None else _schema(schema),
        }
    if isinstance(target, list):
        target = _relations(target)
    elif target is not None:
        target = text(target, "target")
    return TaskInfo(
        name=text(required(content, "name"), "name"),
        kind=text(content.get("task", TASK_KINDS[0]), "task"),
        target=target,
        num_classes=_count(content, "num_classes"),
        num_relations=_count(content, "num_relations"),
        class_names=tuple(text(name, "the name of a class") for name in names),
        options=None if options is None else mapping(options, "options"),
        relation_names=tuple(
            text(name, "the name of a relation")
            for name in listing(content.get("relation_names", []), "names")
        ),
        **more,
    )


def _relations(value: Any) -> Any:
    """A relation, or several, of which some may be none."""
    entries = listing(value, "relations")
    if entries and all(isinstance(entry, str) for entry in entries):
        return _relation(entries)
    return tuple(None if entry is None else _relation(entry) for entry in entries)


def _relation(value: Any) -> CanonicalEType:
    names = [text(name, "the name of a type") for name in listing(value, "a relation")]
    if len(names) != 3:
        raise ValueError(f"a relation must have three names (got {shown(value)})")
    return names[0], names[1], names[2]


def _schema(value: Any) -> dict[str, Any]:
    schema = mapping(value, "schema")
    for owner in ("nodes", "edges"):
        for name, of_type in mapping(required(schema, owner), f"schema of {owner}").items():
            listing(required(mapping(of_type, f"schema of {name}"), "features"), "features")
    required(schema, "label")
    return dict(schema)


def _count(content: Mapping[str, Any], key: str) -> int | None:
    count = required(content, key)
    if count is not None and whole_number(count, key) > _MOST_CLASSES:
        raise ValueError(f"{key} must be at most {_MOST_CLASSES} (got {count})")
    return count if count is None else int(count)


def partition_dataset(
    dataset: NodeDataset | DatasetArrays,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    balance_field: str | None = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = True,
    **arguments: Any,
) -> Path:
    """Partition a data set into a folder, with the description of its task beside the JSON.

    Args:
        name: Name of the graph and of the JSON; None: the data set's.
        balance_field: Node feature of the target type whose values are to be spread evenly.
        options: How the graph was prepared, to be noted beside the partition.
        quiet: Do not print the table of statistics.
        **arguments: More for `graphshard.partition.partition_graph`.

    Returns:
        The path of the JSON.

    Raises:
        ValueError: There are more parts than nodes, or the field does not fit; and those of
            `graphshard.partition.partition_graph`.
    """
    counts = dataset.node_counts
    num_nodes = sum(counts.values())
    if num_parts > num_nodes:
        raise ValueError(
            f"there must be no more parts, or workers, than nodes of {dataset.name}, {num_nodes} "
            f"(got {num_parts}): a part without nodes has nothing to do"
        )
    name = dataset.name if name is None else name
    if balance_field is not None:
        fields, target = dataset.target_fields, dataset.target
        arguments["balance_ntypes"] = balance_classes(fields, counts, target, balance_field)
    partition_graph(dataset.source, name, num_parts, out, quiet=quiet, **arguments)
    json_path = Path(out) / f"{name}.json"
    task = TaskInfo.of_dataset(dataset, dict(options or {}))
    build = json.loads(json_path.read_text(encoding="utf-8"))["build"]
    _write_task(task_path(json_path), task, build)
    return json_path


def balance_classes(
    fields: Mapping[str, Any], num_nodes: Mapping[str, int], target: str, field: str
) -> Tensor | dict[str, Tensor]:
    """Whole numbers from 0 for the values of a node feature, as ``balance_ntypes`` wants them.

    Args:
        fields: Tensors or arrays of the target's nodes.
        num_nodes: By node type.
    """
    if field not in fields:
        raise ValueError(
            f"balance_ntypes must name a node feature of type '{target}' (got {field!r}; "
            f"there are {', '.join(sorted(fields))})"
        )
    values = torch.as_tensor(fields[field])
    if values.ndim != 1:
        raise ValueError(
            f"balance_ntypes needs one value per node (got {field!r} of shape "
            f"{tuple(values.shape)})"
        )
    distinct, classes = torch.unique(values, return_inverse=True)
    if distinct.numel() < 2 or 2 * distinct.numel() > max(values.numel(), 4):
        raise ValueError(
            f"balance_ntypes needs a few values that many nodes share (got {field!r} with "
            f"{distinct.numel()} values for {values.numel()} nodes); leave it out, or name a "
            "feature such as the class"
        )
    if len(num_nodes) == 1:
        return classes
    zeros = {ntype: torch.zeros(n, dtype=torch.int64) for ntype, n in num_nodes.items()}
    return zeros | {target: classes}
