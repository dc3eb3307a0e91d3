# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.optim``: optimizers of embeddings that live on servers.

Importing it gives them ``save`` and ``load``, as DGL's have. A checkpoint of the whole cluster is
`graphshard.servers.save_checkpoint`, which rows of any number of trainers and parts come back from.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ..errors import GraphValueError
from ..servers import SparseAdagrad as SparseAdagrad
from ..servers import SparseAdam as SparseAdam
from ..servers import SparseSGD as SparseSGD
from ..servers import client_barrier as _client_barrier
from .data.utils import load_info, save_info


def save(optimizer: Any, f: str | os.PathLike[str]) -> None:
    """Write the rows of state: each trainer writes a share of them into a file of its own.

    All trainers must call. The rows of the embeddings are not among them.

    Args:
        f: The trainers' files are called that, with ``_`` and their rank after it.
    """
    rank, world_size = _ranks()
    tables: dict[str, Any] = {}
    for tensor in optimizer.tensors()[len(optimizer._params) :]:
        ids = torch.arange(len(tensor) * rank // world_size, len(tensor) * (rank + 1) // world_size)
        tables[tensor.name] = {"ids": ids, "rows": tensor[ids]}
    content = {"world_size": world_size, "state": optimizer.state_dict(), "tables": tables}
    save_info(f"{os.fspath(f)}_{rank}", content)
    _client_barrier()


def load(optimizer: Any, f: str | os.PathLike[str]) -> None:
    """Read what `save` wrote, by any number of trainers; all trainers must call.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: The files are of another kind of optimizer, or of other embeddings.
    """
    rank, world_size = _ranks()
    content = load_info(f"{os.fspath(f)}_0")
    optimizer.check_state_dict(content["state"])
    tables = {t.name: t for t in optimizer.tensors()[len(optimizer._params) :]}
    for number in range(rank, content["world_size"], world_size):
        rows = load_info(f"{os.fspath(f)}_{number}")["tables"]
        if set(rows) != set(tables):
            raise GraphValueError(f"{os.fspath(f)}_{number} is of other embeddings")
        for name, part in rows.items():
            if len(part["ids"]):
                tables[name][part["ids"]] = part["rows"]
    _client_barrier()
    optimizer.load_state_dict(content["state"])


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


for _kind in (SparseAdagrad, SparseAdam, SparseSGD):
    for _method in (save, load):
        setattr(_kind, _method.__name__, _method)
