# SPDX-License-Identifier: Apache-2.0
"""TaskInfo: what a partition is to be trained for, kept in a small JSON beside it.

``graphshard partition`` writes ``NAME.dataset.json`` next to ``NAME.json``. A partition that was
made by calling `graphshard.distributed.partition_graph` has none; what it would say is then
derived from the features: the target is the node type that has labels, and the classes and
relations are counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._written_files import writing
from ..data import NodeDataset
from ..errors import PartitionFormatError

FORMAT = "graphshard-dataset"
FORMAT_VERSION = 1
TASK = "node classification"


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A node classification task on a partitioned graph.

    Args:
        name: Name of the data set.
        target: Node type that is classified; None: the one that has labels.
        num_classes: Number of classes; None: counted.
        num_relations: Number of values of the edge feature ``etype``; None: counted, or there is
            no such feature.
        class_names: Name of each class, or empty.
        options: How the graph was prepared, for the reader.
    """

    name: str
    target: str | None = None
    num_classes: int | None = None
    num_relations: int | None = None
    class_names: tuple[str, ...] = ()
    options: dict[str, Any] | None = None

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
        )


def task_path(partition_json: str | os.PathLike[str]) -> Path:
    """Where the task of a partition is kept."""
    path = Path(partition_json)
    return path.with_name(f"{path.stem}.dataset.json")


def write_task(partition_json: str | os.PathLike[str], task: TaskInfo) -> None:
    """Write the task of the partition that is there now, in one atomic step."""
    path = task_path(partition_json)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "task": TASK,
        "build": _build(partition_json),
        **asdict(task),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path), open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
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
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {content['format']!r} {content['format_version']!r}")
        if content["build"] != _build(partition_json):
            return unknown  # left over from another partition of the same name
        return TaskInfo(
            name=str(content["name"]),
            target=content["target"],
            num_classes=content["num_classes"],
            num_relations=content["num_relations"],
            class_names=_names(content["class_names"]),
            options=content["options"],
        )
    except FileNotFoundError:
        return unknown
    except (ValueError, KeyError, TypeError) as error:
        raise PartitionFormatError(
            f"{path} does not describe a task ({type(error).__name__}: {error}); partition the "
            "graph again, or remove the file to have the task derived from the features"
        ) from None


def _names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(name) for name in names)


def _build(partition_json: str | os.PathLike[str]) -> str | None:
    content = json.loads(Path(partition_json).read_text(encoding="utf-8"))
    build = content.get("build")
    return None if build is None else str(build)
