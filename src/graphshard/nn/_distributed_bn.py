# SPDX-License-Identifier: Apache-2.0
"""DistributedBN1D: batch normalisation over the rows of all ranks.

Each rank sums up its own rows as (count, mean, sum of squared deviations), the triples of all
ranks are gathered in one exchange, and every rank merges them in rank order, in float64, as in
`Updating Formulae and a Pairwise Algorithm for Computing Sample Variances
<http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf>`_ (Chan, Golub and LeVeque,
1979). Squares of the values themselves are never summed, so a large common offset costs no digits.
The backward pass needs two sums over all rows per channel, in one exchange; the gradients of the
affine parameters stay local sums, which `gather_grads` adds up like those of every other
parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .._base.typing import Device
from ..comm import world_size
from ..comm.collectives import all_gather, all_reduce_alike
from ..comm.group import group_state


@dataclass(frozen=True)
class Statistics:
    """Of the rows of all ranks, per channel, in float64.

    Attributes:
        count: Number of values.
        mean: ``[channels]``.
        squares: ``[channels]``, sum of the squared deviations from the mean.
    """

    count: int
    mean: Tensor
    squares: Tensor


class DistributedBN1D(nn.BatchNorm1d):
    r""":class:`torch.nn.BatchNorm1d` whose statistics are those of all ranks' rows.

    .. math::
        y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \, \gamma + \beta

    from `Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
    Shift <https://arxiv.org/abs/1502.03167>`_, with :math:`\mu` and :math:`\sigma^2` taken over the
    concatenation of what all ranks pass in; output, input gradient and running statistics are
    those of ``BatchNorm1d`` on that concatenation. A rank may have no rows. While training, every
    rank of the group must call the layer, and run its backward, the same number of times. Without
    a process group the layer is a ``BatchNorm1d``. Arguments by position are those of SAR's layer.

    Args:
        num_features: Number of channels; also called ``n_feats``, as by SAR.
        eps: :math:`\epsilon`.
        affine: Learn :math:`\gamma` and :math:`\beta`. It is third, as in SAR's layer of this name;
            ``BatchNorm1d`` has ``momentum`` there, which goes by name here.
        distributed: ``False`` normalises over this rank's rows alone; ``None`` is ``True``.
        momentum: Weight of the newest batch in the running statistics; ``None`` for the plain
            mean over all batches.
        track_running_stats: Keep running statistics and use them in ``eval`` mode; otherwise
            statistics are always those of the batch.
        group: The ranks to normalise over; ``None`` for all.
        n_feats: ``num_features``, as SAR names it.

    Shape:
        Input ``[num_rows, num_features]`` or ``[num_rows, num_features, length]``; the output has
        the shape and dtype of the input. Statistics are computed in float32 at least.

    Raises:
        TypeError: ``affine`` or ``distributed`` is no bool; no number of channels, or two.
        ValueError: Input of another shape; a single value per channel over all ranks while
            training (on every rank alike).

    Example:
        >>> import torch
        >>> from graphshard.nn import DistributedBN1D
        >>> DistributedBN1D(3)(torch.arange(6.0).reshape(2, 3)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        num_features: int | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        distributed: bool | None = True,
        *,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        n_feats: int | None = None,
    ) -> None:
        if (num_features is None) == (n_feats is None):
            raise TypeError(
                "DistributedBN1D needs the number of channels once, as num_features or n_feats "
                f"(got {num_features} and {n_feats})"
            )
        if not isinstance(affine, bool) or not isinstance(distributed, bool | None):
            raise TypeError(
                "the third and fourth argument of DistributedBN1D are affine and distributed, "
                f"True or False (got {affine!r} and {distributed!r}); BatchNorm1d has momentum and "
                "affine there: write momentum=... and affine=..."
            )
        channels: Any = n_feats if num_features is None else num_features
        super().__init__(
            channels, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.group = group
        self.distributed = distributed is not False

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; see the class for shapes."""
        if hasattr(input, "materialize"):  # edge values of a sharded graph, computed when needed
            input = input.materialize()
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"the input needs {self.num_features} channels in dimension 1 (got shape "
                f"{tuple(input.shape)})"
            )
        batch_statistics = self.training or self.running_mean is None
        alone = not self.distributed or world_size(self.group) == 1
        if alone or not batch_statistics:
            return super().forward(input)

        with torch.no_grad():
            packed = all_gather(
                group_state(self.group), pack_statistics(input), "statistics of DistributedBN1D"
            )
            statistics = merge_statistics(torch.stack(packed), self.num_features)
            if statistics.count == 1:
                raise ValueError(
                    "batch statistics need more than one value per channel over all ranks (got 1); "
                    "use a larger batch, or eval() with running statistics"
                )
            if self.training and self.track_running_stats:
                self._update_running_statistics(statistics)
            variance = statistics.squares / max(statistics.count, 1)
            inverse_std = (variance + self.eps).rsqrt()
        count, mean = statistics.count, statistics.mean
        affine = self.weight, self.bias
        return _Normalize.apply(input, *affine, mean, inverse_std, count, self.group)

    def _update_running_statistics(self, statistics: Statistics) -> None:
        """Move the running mean and (unbiased) variance towards those of this batch."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if statistics.count == 0:
            return
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        variance = statistics.squares / (statistics.count - 1)
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, variance)):
            running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, distributed={self.distributed}"


def pack_statistics(x: Tensor) -> Tensor:
    """Of the rows of this rank: count, means, sums of squared deviations.

    Args:
        x: ``[num_rows, channels]`` or ``[num_rows, channels, length]``.

    Returns:
        float64 ``[1 + 2 * channels]``; zeros where there are no rows.
    """
    channels = x.shape[1]
    packed = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    count = x.numel() // channels if channels else 0
    if count:
        dims = _row_dims(x)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        shift = x.mean(dims)
        centered = x - _column(shift, x)
        rest = centered.mean(dims).double()  # what rounding left out of the shift
        squares = centered.square_().sum(dims).double()
        packed[0] = count
        packed[1 : channels + 1] = shift.double() + rest
        packed[channels + 1 :] = (squares - count * rest.square()).clamp_(min=0)
    return packed


def merge_statistics(packed: Tensor, channels: int) -> Statistics:
    """Statistics of all rows from those of each rank.

    Args:
        packed: ``[num_ranks, 1 + 2 * channels]``, see `pack_statistics`.
    """
    counts, means, squares = packed.split([1, channels, channels], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    between = counts * (means - mean).square()
    return Statistics(int(count), mean, (squares + between).sum(0))


def _row_dims(x: Tensor) -> list[int]:
    """Every dimension but the channels."""
    return [0, *range(2, x.dim())]


class _Normalize(torch.autograd.Function):
    """Normalise with given statistics, and differentiate as if they were computed here.

    Factors per channel are computed in float64. The mean is subtracted in the dtype of the rows,
    and what its rounding left out goes into the offset, so that it costs no pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse_std: Tensor,
        count: int,
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse_std)
        ctx.count, ctx.group = count, group
        y, rest = _center(x, mean)
        scale = inverse_std if weight is None else inverse_std * weight
        offset = -rest * scale if bias is None else bias - rest * scale
        return torch.addcmul(_column(offset, y), y, _column(scale, y), out=y).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std = ctx.saved_tensors
        centered, rest = _center(x, mean)
        grad = grad.to(centered.dtype)
        dims = _row_dims(x)
        grad_sum = grad.sum(dims).double()
        product_sum = (grad * centered).sum(dims).double() - rest * grad_sum
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([grad_sum, product_sum])
            if world_size(ctx.group) > 1:
                sums = all_reduce_alike(sums, group=ctx.group)
            mean_grad, mean_product = (sums / max(ctx.count, 1)).chunk(2)
            scale = inverse_std if weight is None else inverse_std * weight
            slope = -scale * inverse_std.square() * mean_product
            offset = -scale * mean_grad - slope * rest
            grad_x = torch.addcmul(
                _column(offset, centered), centered, _column(slope, centered), out=centered
            )
            grad_x = grad_x.addcmul_(grad, _column(scale, centered)).to(x.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        grad_weight = (product_sum * inverse_std).to(weight.dtype) if needs_weight else None
        grad_bias = grad_sum.to(weight.dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _center(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """(``x`` minus the rounded mean, in float32 at least; the rest of the mean)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rounded = mean.to(x.dtype)
    return x - _column(rounded, x), mean - rounded


def _column(values: Tensor, x: Tensor) -> Tensor:
    """``[channels]`` in the dtype of ``x``, shaped to broadcast against it."""
    return values.to(x.dtype).reshape(1, -1, *(1,) * (x.dim() - 2))
