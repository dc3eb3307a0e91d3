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
from .dataset import SPLITS, NodeDataset

FORMAT = "graphshard-dataset"
FORMAT_VERSION = 3
READ_VERSIONS = (2, 3)
NODE_CLASSIFICATION, NODE_REGRESSION = "node classification", "node regression"
EDGE_CLASSIFICATION, EDGE_REGRESSION = "edge classification", "edge regression"
LINK_PREDICTION = "link prediction"
KINDS = (
    NODE_CLASSIFICATION,
    NODE_REGRESSION,
    EDGE_CLASSIFICATION,
    EDGE_REGRESSION,
    LINK_PREDICTION,
)
"""What a partition may be for."""
EDGE_KINDS = (EDGE_CLASSIFICATION, EDGE_REGRESSION, LINK_PREDICTION)
"""Those whose target is a relation."""
_MOST_CLASSES = 2**31


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A task on a partitioned graph.

    Args:
        kind: One of `KINDS`.
        target: Node type, or canonical relation, that is predicted; None: the one that has labels,
            or for link prediction masks.
        num_classes: Number of classes, or of labels of a node; None: counted.
        is_multilabel: Whether each node or edge may be of several classes at once.
        reverse_of: Of a task on edges, the relation that holds the reverse of the target's edges.
        schema: How tables became ids, features and labels; see `graphshard.data.tables`.
        num_relations: Number of values of the edge feature ``etype``; None: counted, or there is
            no such feature.
        options: How the graph was prepared, for the reader.
    """

    name: str
    kind: str = NODE_CLASSIFICATION
    target: str | CanonicalEType | None = None
    num_classes: int | None = None
    num_relations: int | None = None
    class_names: tuple[str, ...] = ()
    options: dict[str, Any] | None = None
    is_multilabel: bool = False
    reverse_of: CanonicalEType | None = None
    schema: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)} (got {self.kind!r:.80})")
        is_right = self.target is None or isinstance(self.target, str) != (self.kind in EDGE_KINDS)
        if not is_right:
            what = "a relation, (source type, name, destination type)"
            raise ValueError(
                f"the target of {self.kind} must be "
                f"{what if self.kind in EDGE_KINDS else 'a node type'} (got {self.target!r:.80})"
            )

    @classmethod
    def of_dataset(cls, dataset: NodeDataset, options: dict[str, Any] | None = None) -> TaskInfo:
        """What there is to know about a data set."""
        return cls(
            name=dataset.name,
            target=dataset.target,
            num_classes=dataset.num_classes,
            num_relations=len(dataset.relation_names) or None,
            class_names=dataset.class_names,
            options=options,
            is_multilabel=dataset.graph.nodes[dataset.target].data["label"].ndim > 1,
        )


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


def warn_of_task(dataset: NodeDataset) -> None:
    """Warn of what training on a data set would warn of."""
    fields = dataset.graph.nodes[dataset.target].data
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


def write_task(partition_json: str | os.PathLike[str], task: TaskInfo) -> None:
    """Write the task of the partition that is there now, in one atomic step."""
    _write_task(task_path(partition_json), task, read_config(partition_json).build)


def _write_task(path: Path, task: TaskInfo, build: str | None) -> None:
    fields = asdict(task)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "task": fields.pop("kind"),
        "build": build,
        **fields,
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
    path = task_path(partition_json)
    unknown = TaskInfo(name=Path(partition_json).stem)
    try:
        content = mapping(read_json_regular(path), "the JSON")
        version = required(content, "format"), required(content, "format_version")
        if version not in [(FORMAT, number) for number in READ_VERSIONS]:
            raise ValueError(f"format {shown(version[0])} {shown(version[1])}")
        if required(content, "digest") != digest_of_content(content, "digest"):
            raise ValueError("it was changed after it was written: its digest differs")
        if required(content, "build") != read_config(partition_json).build:
            return unknown  # left over from another partition of the same name
        return _read(content)
    except PartitionFormatError:
        raise
    except FileNotFoundError:
        return unknown
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PartitionFormatError(
            f"{path} does not describe a task ({why}); partition the graph again, or remove the "
            "file to have the task derived from the features"
        ) from None


def _read(content: Mapping[str, Any]) -> TaskInfo:
    options = required(content, "options")
    names = listing(required(content, "class_names"), "names")
    newer: dict[str, Any] = {}
    if content["format_version"] != 2:
        schema, is_multilabel = required(content, "schema"), required(content, "is_multilabel")
        if not isinstance(is_multilabel, bool):
            raise ValueError(f"is_multilabel must be true or false (got {shown(is_multilabel)})")
        newer = {
            "kind": text(required(content, "task"), "task"),
            "is_multilabel": is_multilabel,
            "reverse_of": _target(required(content, "reverse_of"), "reverse_of"),
            "schema": None if schema is None else dict(mapping(schema, "schema")),
        }
    return TaskInfo(
        **newer,
        name=text(required(content, "name"), "name"),
        target=_target(required(content, "target"), "target"),
        num_classes=_count(content, "num_classes"),
        num_relations=_count(content, "num_relations"),
        class_names=tuple(text(name, "the name of a class") for name in names),
        options=None if options is None else mapping(options, "options"),
    )


def _target(value: Any, key: str) -> Any:
    """A node type, a relation or None."""
    if value is None or isinstance(value, str):
        return None if value is None else text(value, key)
    words = tuple(text(word, key) for word in listing(value, "names"))
    if len(words) != 3:
        raise ValueError(f"{key} must have source type, name and destination type (got {words})")
    return words


def _count(content: Mapping[str, Any], key: str) -> int | None:
    count = required(content, key)
    if count is not None and whole_number(count, key) > _MOST_CLASSES:
        raise ValueError(f"{key} must be at most {_MOST_CLASSES} (got {count})")
    return count if count is None else int(count)


def partition_dataset(
    dataset: NodeDataset,
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
    num_nodes = dataset.graph.num_nodes()
    if num_parts > num_nodes:
        raise ValueError(
            f"there must be no more parts, or workers, than nodes of {dataset.name}, {num_nodes} "
            f"(got {num_parts}): a part without nodes has nothing to do"
        )
    name = dataset.name if name is None else name
    if balance_field is not None:
        arguments["balance_ntypes"] = _balance_classes(dataset, balance_field)
    partition_graph(dataset.graph, name, num_parts, out, quiet=quiet, **arguments)
    json_path = Path(out) / f"{name}.json"
    task = TaskInfo.of_dataset(dataset, dict(options or {}))
    build = json.loads(json_path.read_text(encoding="utf-8"))["build"]
    _write_task(task_path(json_path), task, build)
    return json_path


def _balance_classes(dataset: NodeDataset, field: str) -> Tensor | dict[str, Tensor]:
    """Whole numbers from 0 for the values of a node feature, as ``balance_ntypes`` wants them."""
    graph = dataset.graph
    fields = graph.nodes[dataset.target].data
    if field not in fields:
        raise ValueError(
            f"balance_ntypes must name a node feature of type '{dataset.target}' (got {field!r}; "
            f"there are {', '.join(sorted(fields))})"
        )
    values = fields[field]
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
    if len(graph.ntypes) == 1:
        return classes
    zeros = {t: torch.zeros(graph.num_nodes(t), dtype=torch.int64) for t in graph.ntypes}
    return zeros | {dataset.target: classes}
