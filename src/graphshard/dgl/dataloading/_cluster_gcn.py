# SPDX-License-Identifier: Apache-2.0
"""ClusterGCNSampler: batches of whole clusters, which METIS makes once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..._base.files import check_regular
from ...errors import GraphValueError
from ...graph import Graph
from ...partition import UndirectedGraph, metis_partition
from ...sampling.lazy_features import FeatureNames
from ._induced import SubgraphSampler

_KEYS = {"partition_offset", "partition_node_ids"}


class ClusterGCNSampler(SubgraphSampler):
    """Divides a graph into clusters; a batch is the graph of the nodes of some of them.

    Source: Chiang et al., "Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph
    Convolutional Networks", KDD 2019, https://arxiv.org/abs/1905.07953.

    Args:
        g: A graph of this process, of one node type and one relation.
        k: Number of clusters; a loader over this sampler iterates over ``torch.arange(k)``.
        cache_path: File that keeps the clusters (safetensors); what is there is used again. None
            keeps none.
        balance_ntypes: ``[num_nodes]`` a class for each node; clusters get alike many of each.
        balance_edges: Clusters get alike many edges.
        mode: ``"k-way"`` or ``"recursive"`` bisection.
        prefetch_ndata: As for `SubgraphSampler`.
        prefetch_edata: As for `SubgraphSampler`.
        output_device: As for `SubgraphSampler`.

    Raises:
        DGLError: A graph of several types, another mode, or a file at ``cache_path`` that holds no
            clusters, or those of another graph or ``k``.
        MetisError: METIS is not there, or failed.

    Example:
        >>> from graphshard.data import load_dataset
        >>> cora = load_dataset("cora").graph
        >>> sampler = ClusterGCNSampler(cora, 10, cache_path=None)
        >>> sampler.sample(cora, torch.tensor([0, 1])).num_nodes() < cora.num_nodes()
        True
    """

    def __init__(
        self,
        g: Graph,
        k: int,
        cache_path: str | os.PathLike[str] | None = "cluster_gcn.safetensors",
        balance_ntypes: Any = None,
        balance_edges: bool = False,
        mode: str = "k-way",
        prefetch_ndata: FeatureNames = None,
        prefetch_edata: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(prefetch_ndata, prefetch_edata, output_device)
        if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
            raise GraphValueError(
                f"ClusterGCNSampler takes a graph of one relation (got {g.canonical_etypes}); make "
                "one with to_homogeneous"
            )
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise GraphValueError(f"k must be a positive number of clusters (got {k!r})")
        if mode not in ("k-way", "recursive"):
            raise GraphValueError(f"mode must be 'k-way' or 'recursive' (got {mode!r})")
        path = None if cache_path is None else Path(cache_path)
        if path is not None and path.exists():
            kept = _read(path, k, g.num_nodes())
        else:
            parts = torch.from_numpy(_clusters(g, k, balance_ntypes, balance_edges, mode))
            sizes = torch.bincount(parts, minlength=k)
            offset = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
            kept = {
                "partition_offset": offset,
                "partition_node_ids": torch.argsort(parts, stable=True),
            }
            if path is not None:
                _write(kept, path)
        self.partition_offset = kept["partition_offset"]
        self.partition_node_ids = kept["partition_node_ids"]

    def sample(self, g: Graph, partition_ids: Any) -> Graph:
        """The graph of all nodes of some clusters.

        Args:
            g: The graph that was divided.
            partition_ids: Numbers of clusters, each once.

        Raises:
            DGLError: A cluster that is not there, or is given twice.
        """
        numbers = torch.as_tensor(partition_ids).reshape(-1).tolist()
        offset = self.partition_offset.tolist()
        if any(not 0 <= number < len(offset) - 1 for number in numbers):
            raise GraphValueError(f"clusters must be in [0, {len(offset) - 1}) (got {numbers})")
        rows = [self.partition_node_ids[offset[n] : offset[n + 1]] for n in numbers]
        nodes = torch.cat([self.partition_node_ids[:0], *rows])
        nodes = nodes.to(device=g.device, dtype=g.idtype)
        return self.with_features(g, self.induced(g, {g.ntypes[0]: nodes}))


def _clusters(
    g: Graph, k: int, balance_ntypes: Any, balance_edges: bool, mode: str
) -> npt.NDArray[np.int64]:
    num_nodes = g.num_nodes()
    if k == 1 or num_nodes <= k:
        alone: npt.NDArray[np.int64] = np.arange(num_nodes, dtype=np.int64) % k
        return alone
    columns: list[npt.NDArray[np.int64]] = []
    if balance_ntypes is not None:
        classes = torch.as_tensor(balance_ntypes).cpu().numpy()
        if classes.shape != (num_nodes,):
            raise GraphValueError(
                f"balance_ntypes must have one class for each of {num_nodes} nodes (got shape "
                f"{classes.shape})"
            )
        columns += [(classes == one).astype(np.int64) for one in np.unique(classes)]
    if balance_edges:
        columns.append(g.in_degrees().cpu().numpy().astype(np.int64))
    weights = np.stack(columns, 1) if columns else None
    undirected = UndirectedGraph.from_edges([g.cpu().edges()], num_nodes)
    return metis_partition(
        undirected,
        k,
        node_weights=weights,
        method="kway" if mode == "k-way" else "recursive",
    )


def _read(path: Path, k: int, num_nodes: int) -> dict[str, Tensor]:
    cure = f"remove {path}, or give another cache_path"
    try:
        check_regular(path)
        kept = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise GraphValueError(f"the file of clusters cannot be read ({error}); {cure}") from None
    if set(kept) != _KEYS or any(x.dim() != 1 or x.dtype != torch.int64 for x in kept.values()):
        raise GraphValueError(f"the file holds no clusters (it has {sorted(kept)}); {cure}")
    offset, nodes = kept["partition_offset"], kept["partition_node_ids"]
    if len(offset) != k + 1:
        raise GraphValueError(f"the file has {len(offset) - 1} clusters and not k={k}; {cure}")
    rising = int(offset[0]) == 0 and bool((offset.diff() >= 0).all())
    if len(nodes) != num_nodes or not rising or int(offset[-1]) != num_nodes:
        raise GraphValueError(
            f"the file has clusters of {len(nodes)} nodes, and the graph has {num_nodes}; {cure}"
        )
    if not torch.equal(nodes.sort().values, torch.arange(num_nodes)):
        raise GraphValueError(f"the file does not have each node in one cluster; {cure}")
    return kept


def _write(kept: dict[str, Tensor], path: Path) -> None:
    """Whole or not at all, also where several processes write at a time."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        save_file(kept, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
