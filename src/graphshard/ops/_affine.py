# SPDX-License-Identifier: Apache-2.0
"""affine: what dense layers do between aggregations, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import handle_torch_function

from .._base.kernels import LARGE_BYTES, empty, empty_like, kernels_for
from . import _check

Product = tuple[Tensor, Tensor]


def affine(
    products: Sequence[Product],
    bias: Tensor | None = None,
    plus: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    r"""Rows times matrices, summed up: :math:`\sigma(\sum_i x_i w_i + b + p)`.

    Large results on the CPU are added up in place, in memory that is used again (see
    [Note: memory of results] in ``_base/kernels.py``); others are plain torch. Under autocast the
    operands are cast as those of ``torch.nn.functional.linear`` are. Differentiable, also twice.

    Args:
        products: At least one pair of rows :math:`x_i` ``[*, in_i]``, whose leading dimensions
            are equal, and a matrix :math:`w_i` ``[in_i, out]``. Rows may be anything that has
            ``__torch_function__``.
        bias: :math:`b` ``[out]``.
        plus: :math:`p` ``[*, out]``.
        relu: Whether :math:`\sigma` is the ReLU; else there is none.

    Returns:
        ``[*, out]``.

    Raises:
        TypeError: An operand is not a tensor, or dtypes differ without autocast.
        ValueError: There is no product, shapes do not belong together, or devices differ.
    """
    rows = [x for x, _ in products]
    if not rows:
        raise ValueError("affine needs at least one pair of rows and a matrix (got none)")
    if not all(isinstance(x, Tensor) for x in rows):
        return handle_torch_function(affine, rows, products, bias, plus, relu)
    _check_shapes(products, bias, plus)
    leading = rows[0].shape[:-1]
    if not _gains(products):
        return _plain(products, bias, plus, relu)
    flat = []
    for x, w in products:
        flat += [_cast(x).reshape(-1, x.shape[-1]), _cast(w)]
    width = products[0][1].shape[1]
    bias = None if bias is None else _cast(bias)
    plus = None if plus is None else _cast(plus).reshape(-1, width)
    result: Tensor = _Affine.apply(relu, bias, plus, *flat)
    return result.view(*leading, width)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """What ``layer`` makes of ``x``; see `affine`. What is not `is_plain` is called."""
    if not is_plain(layer, nn.Linear):
        return layer(x)
    return affine([(x, layer.weight.t())], layer.bias)


def is_relu(activation: Callable[[Tensor], Tensor] | None) -> bool:
    """Whether an activation is torch's ReLU."""
    relu_functions: tuple[Any, ...] = (functional.relu, torch.relu)
    return activation in relu_functions or (
        isinstance(activation, nn.Module) and is_plain(activation, nn.ReLU)
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling a module does what its class says and nothing else.

    Only then may a kernel compute in its place. Not plain are a subclass (an adapter, a quantized
    or parametrized layer), a module with hooks (spectral or weight normalization are such) and one
    whose ``forward`` was replaced.
    """
    return type(module) is kind and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, or its work was replaced."""
    attributes = vars(module)
    return (
        "forward" in attributes
        or any(attributes[name] for name in _HOOKS)
        or any(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS)
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check_shapes(products: Sequence[Product], bias: Tensor | None, plus: Tensor | None) -> None:
    for _, w in products:
        _check.check_tensor("a matrix of affine", w)
    for name, value in (("bias", bias), ("plus", plus)):
        if value is not None:
            _check.check_tensor(f"{name} of affine", value)
    _, matrix = products[0]
    added = [t for t in (bias, plus) if t is not None]
    for x, w in (*products, *((t, matrix) for t in added)):
        if x.device != w.device:
            raise ValueError(
                f"operands of affine must be on one device (got {x.device} and {w.device}); move "
                "one with .to(...)"
            )
        if x.dtype != w.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"operands of affine must have one dtype (got {x.dtype} and {w.dtype}); "
                "convert one with .to(...)"
            )
    leading, width = products[0][0].shape[:-1], products[0][1].shape[-1:]
    fits = all(
        x.dim() > 0 and w.shape == (x.shape[-1], *width) and x.shape[:-1] == leading
        for x, w in products
    )
    fits &= bias is None or bias.shape == width
    fits &= plus is None or plus.shape == (*leading, *width)
    if not fits:
        shapes = [(tuple(x.shape), tuple(w.shape)) for x, w in products]
        sizes = [None if t is None else tuple(t.shape) for t in (bias, plus)]
        raise ValueError(
            "rows must be [*, in], matrices [in, out], bias [out] and plus [*, out] (got "
            f"{shapes}, bias {sizes[0]} and plus {sizes[1]}); all leading dimensions are equal"
        )


def _gains(products: Sequence[Product]) -> bool:
    """Whether the result is large, and of a kind that memory is kept for."""
    x, w = products[0]
    operands = [t for pair in products for t in pair]
    if any(t.device.type != "cpu" or t.layout != torch.strided for t in operands):
        return False
    if not all(t.is_floating_point() for t in operands):
        return False
    if any(type(t) not in (Tensor, nn.Parameter) for t in operands) or _is_transformed():
        return False
    rows = x.shape[:-1].numel()
    return rows * w.shape[1] * 4 >= LARGE_BYTES and kernels_for(x.device) is not None


def _is_transformed() -> bool:
    """Whether torch.func or the compiler is at work, which look inside of plain operators only."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _cast(tensor: Tensor) -> Tensor:
    if not torch.is_autocast_enabled("cpu") or tensor.dtype == torch.float64:
        return tensor
    dtype = torch.get_autocast_dtype("cpu")
    if tensor.requires_grad or tensor.dtype == dtype or tensor.numel() * 2 < LARGE_BYTES:
        return tensor.to(dtype)
    return empty(tensor.shape, dtype).copy_(tensor)  # input features: a large copy per epoch


def _plain(
    products: Sequence[Product], bias: Tensor | None, plus: Tensor | None, relu: bool
) -> Tensor:
    (x, w), *others = products
    result = functional.linear(x, w.t(), bias)
    for x, w in others:
        result = result + x @ w
    if plus is not None:
        result = result + plus
    return result.relu() if relu else result


class _Affine(Function):
    """Two-dimensional operands of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, relu: bool, bias: Tensor | None, plus: Tensor | None, *flat: Tensor
    ) -> Tensor:
        x, w = flat[:2]
        out = empty((x.shape[0], w.shape[1]), x.dtype)
        first = plus if plus is not None else bias
        if first is None:
            torch.mm(x, w, out=out)
        else:
            torch.addmm(first, x, w, out=out)
        for x, w in zip(flat[2::2], flat[3::2], strict=True):
            out.addmm_(x, w)
        if plus is not None and bias is not None:
            out.add_(bias)
        if relu:
            out.relu_()
        ctx.save_for_backward(*flat, *([out] if relu else []))
        ctx.relu = relu
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        _, want_bias, want_plus, *wanted = ctx.needs_input_grad
        if ctx.relu:
            grad = _where_positive(grad, saved.pop())
        grads: list[Tensor | None] = []
        for x, w, want_x, want_w in zip(
            saved[::2], saved[1::2], wanted[::2], wanted[1::2], strict=True
        ):
            grads.append(_product(grad, w.t()) if want_x else None)
            grads.append(x.t() @ grad if want_w else None)
        return None, grad.sum(0) if want_bias else None, grad if want_plus else None, *grads


def _where_positive(grad: Tensor, result: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return grad * (result > 0)
    masked = empty_like(grad)
    torch.ops.aten.threshold_backward.grad_input(grad, result, 0, grad_input=masked)
    return masked


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # of a gradient that will be differentiated again
        return rows @ matrix
    return torch.mm(rows, matrix, out=empty((rows.shape[0], matrix.shape[1]), rows.dtype))
