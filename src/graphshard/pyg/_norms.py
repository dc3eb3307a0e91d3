# SPDX-License-Identifier: Apache-2.0
"""Normalisations over all nodes, with the statistics of the nodes of all ranks.

PyG's layers of these names take the mean and the variance of the rows that they are given. On a
sharded graph those are one rank's. Here the sums are added up over the ranks first; the gradient
of such a sum is a sum over the ranks, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.collectives import all_reduce_alike
from ..nn import DistributedBN1D


def convert_sync_norm(module: Any, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Give every normalisation over nodes in a model the statistics of all ranks' nodes.

    As :meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm`, on CPUs too, and for PyG's layers:
    ``BatchNorm``, ``GraphNorm``, ``PairNorm``, ``LayerNorm(mode="graph")``, ``InstanceNorm`` and
    ``MeanSubtractionNorm``. Parameters and buffers are taken over as they are, so an optimizer or a
    checkpoint fits before and after.
    Every rank must run the converted layers the same number of times; a rank may have no rows.

    Args:
        module: A model; it is changed.
        group: The ranks whose rows are counted; None is the default group.

    Returns:
        The model, or what took its place if it is such a layer itself.

    Raises:
        NotImplementedError: A normalisation that tracks running statistics of several graphs.

    Example:
        >>> import torch
        >>> from graphshard.pyg import convert_sync_norm
        >>> convert_sync_norm(torch.nn.Sequential(torch.nn.BatchNorm1d(4)))
        Sequential(
          (0): DistributedBN1D(4, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, distributed=True)
        )
    """  # noqa: E501
    return _converted_tree(module, group, {})


def _converted_tree(
    module: nn.Module, group: dist.ProcessGroup | None, converted: dict[nn.Module, nn.Module]
) -> nn.Module:
    """`convert_sync_norm`; a module that stands at several places stays one module there."""
    if module in converted:
        return converted[module]
    made = converted[module] = _converted(module, group)
    if made is not module:
        return made
    for name, child in list(module._modules.items()):  # named_children has each of them once
        if child is not None and _converted_tree(child, group, converted) is not child:
            setattr(module, name, converted[child])
    if "allow_single_element" in vars(module):  # asks for the rows of one rank
        vars(module)["allow_single_element"] = False
    return module


def unsynchronized(module: nn.Module) -> str | None:
    """What `convert_sync_norm` would change in a module itself; None where statistics are right."""
    kind = _kind(module)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if isinstance(module, DistributedBN1D | nn.SyncBatchNorm):
            return None
        uses_batch = module.training or module.running_mean is None
        return type(module).__name__ if uses_batch else None
    if kind == "LayerNorm":
        return "LayerNorm(mode='graph')" if module.mode == "graph" else None
    if kind == "InstanceNorm":
        return kind if module.training or not module.track_running_stats else None
    return kind if kind in _STATISTICS else None


def takes_statistics(module: nn.Module) -> bool:
    """Whether a module's result depends on all rows that it is given at once."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm | DistributedBN1D):
        return module.training or module.running_mean is None
    return isinstance(module, _SyncNorm) or unsynchronized(module) is not None


_STATISTICS = ("GraphNorm", "PairNorm", "MeanSubtractionNorm", "GraphSizeNorm", "HeteroBatchNorm")


def _kind(module: nn.Module) -> str | None:
    """The name of a norm of PyG, told by the module that defines it: PyG need not be imported."""
    for base in type(module).__mro__:
        if base.__module__.startswith("torch_geometric.nn.norm."):
            return base.__name__
    return None


def _converted(module: Any, group: dist.ProcessGroup | None) -> nn.Module:
    made: nn.Module
    kind = _kind(module)
    if isinstance(module, nn.BatchNorm1d) and type(module) is nn.BatchNorm1d:
        made = DistributedBN1D(
            module.num_features,
            module.eps,
            module.affine,
            momentum=module.momentum,
            track_running_stats=module.track_running_stats,
            group=group,
        )
    elif kind in _SYNCHRONIZED and getattr(module, "mode", "graph") == "graph":
        if kind == "InstanceNorm" and module.track_running_stats:
            raise NotImplementedError(
                "InstanceNorm with track_running_stats=True keeps means of several graphs and has "
                "no meaning on one graph that spans ranks; make it with track_running_stats=False"
            )
        made = _SYNCHRONIZED[kind](group)
        for name in ("eps", "scale", "scale_individually"):
            if hasattr(module, name):
                setattr(made, name, getattr(module, name))
    else:
        return module
    made._parameters.update(module._parameters)
    made._buffers.update(module._buffers)
    made.train(module.training)
    return made


class _SyncNorm(nn.Module):
    """A normalisation whose means are over the rows of all ranks; settings are as PyG's layer's."""

    eps: float

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group

    def _mean(self, x: Tensor, batch: Tensor | None, batch_size: int | None) -> Tensor:
        """Mean per column over the rows of each graph on all ranks: ``[num_graphs, columns]``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if batch is None:
            total = wide.sum(0, keepdim=True)
            count = torch.full((1, 1), float(x.shape[0]), dtype=wide.dtype, device=x.device)
        else:
            size = self._num_graphs(batch, batch_size)
            total = wide.new_zeros(size, x.shape[1]).index_add(0, batch, wide)
            count = torch.bincount(batch, minlength=size).to(wide.dtype).unsqueeze(1)
        sums = all_reduce_alike(torch.cat([total, count], 1), group=self.group)
        return sums[:, :-1] / sums[:, -1:].detach().clamp(min=1)

    def _num_graphs(self, batch: Tensor, batch_size: int | None) -> int:
        if batch_size is not None:
            return batch_size
        largest = int(batch.max()) + 1 if batch.numel() else 0
        return int(all_reduce_alike(torch.tensor([largest]), "max", group=self.group))

    @staticmethod
    def _rows(per_graph: Tensor, batch: Tensor | None) -> Tensor:
        return per_graph if batch is None else per_graph.index_select(0, batch)

    def _affine(self, x: Tensor) -> Tensor:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        return x if weight is None or bias is None else x * weight + bias


class SyncGraphNorm(_SyncNorm):
    """PyG's ``GraphNorm``, https://arxiv.org/abs/2009.03294, over the nodes of all ranks."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """``[num_rows, channels]`` to the same shape."""
        mean = self._rows(self._mean(x, batch, batch_size), batch)
        scale = self._parameters.get("mean_scale")
        out = x - (mean if scale is None else mean * scale)
        variance = self._rows(self._mean(out.square(), batch, batch_size), batch)
        return self._affine(out / (variance + self.eps).sqrt()).to(x.dtype)


class SyncPairNorm(_SyncNorm):
    """PyG's ``PairNorm``, https://arxiv.org/abs/1909.12223, over the nodes of all ranks."""

    scale: float
    scale_individually: bool

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """``[num_rows, channels]`` to the same shape."""
        out = x - self._rows(self._mean(x, batch, batch_size), batch)
        if self.scale_individually:
            return (self.scale * out / (self.eps + out.norm(2, -1, keepdim=True))).to(x.dtype)
        lengths = self._mean(out.square().sum(-1, keepdim=True), batch, batch_size)
        return (self.scale * out / (self.eps + self._rows(lengths, batch)).sqrt()).to(x.dtype)


class SyncLayerNorm(_SyncNorm):
    """PyG's ``LayerNorm(mode="graph")``: one mean and variance over all nodes and channels.

    ``eps`` is added to the standard deviation, and with a ``batch`` to the variance.
    """

    mode = "graph"

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """``[num_rows, channels]`` to the same shape."""
        mean = self._mean(x, batch, batch_size).mean(1, keepdim=True)
        out = x - self._rows(mean, batch)
        variance = self._mean(out.square(), batch, batch_size).mean(1, keepdim=True)
        variance = self._rows(variance, batch)
        spread = variance.sqrt() + self.eps if batch is None else (variance + self.eps).sqrt()
        return self._affine(out / spread).to(x.dtype)


class SyncInstanceNorm(SyncGraphNorm):
    """PyG's ``InstanceNorm`` without running statistics: per channel, over a graph's nodes."""


class SyncMeanSubtractionNorm(_SyncNorm):
    """PyG's ``MeanSubtractionNorm``, over the nodes of all ranks."""

    def forward(self, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None) -> Any:
        """``[num_rows, channels]`` to the same shape."""
        return (x - self._rows(self._mean(x, batch, dim_size), batch)).to(x.dtype)


_SYNCHRONIZED = {
    "GraphNorm": SyncGraphNorm,
    "PairNorm": SyncPairNorm,
    "LayerNorm": SyncLayerNorm,
    "MeanSubtractionNorm": SyncMeanSubtractionNorm,
    "InstanceNorm": SyncInstanceNorm,
}
