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
from ._dense import gains, multiply, multiply_transposed

Product = tuple[Tensor, Tensor]
_Left = dict[int, tuple[Tensor, Tensor]]
"""Rows and gradients by the number of the matrix whose gradient is their product."""


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
    if not _gains(products):
        return _plain(products, bias, plus, relu)
    return _added_up(products, bias, plus, relu)


class AffineInSteps:
    r"""`affine` of rows that are here, and of rows that will be.

    Without `start` it is `affine`. With it, products of rows that are here are added up while the
    others are waited for. And in the backward the gradients of later rows are found first, those of
    all matrices and of the rows that were here after everything that came between `start` and
    `finish`: autograd runs the newest node that is ready.

    Args:
        products: Of rows that are here; there may be none.
        matrices: ``[in_i, out]``, of the rows that come later; one at least, or a product.
        bias: ``[out]``.
    """

    def __init__(
        self, products: Sequence[Product], matrices: Sequence[Tensor], bias: Tensor | None = None
    ) -> None:
        self._products, self._matrices, self._bias = list(products), list(matrices), bias
        self._partial: Tensor | None = None
        self._later: _Left | None = None

    def start(self) -> None:
        """Add up the products of rows that are here. Once."""
        products, bias = self._products, self._bias
        if not all(isinstance(x, Tensor) for x, _ in products):
            return
        if products:
            _check_shapes(products, bias, None)
        operands = [t for pair in products for t in pair]
        if not are_plain([*operands, *self._matrices]) or (products and not _gains(products)):
            if products:
                self._partial, self._bias = _plain(products, bias, None, False), None
            return
        self._later, flat = {}, []
        for x, w in products:
            flat += [_matrix(_cast(x)), _cast(w)]
        matrices = [_cast(w) for w in self._matrices]
        if products:
            bias, self._bias = None if bias is None else _cast(bias), None
        else:
            bias = None
        number = len(flat)
        self._matrices = list(_StartAffine.apply(self._later, number, bias, *flat, *matrices))
        if products:
            self._partial = self._matrices.pop(0)

    def finish(self, rows: Sequence[Tensor], plus: Tensor | None = None, relu: bool = False) -> Any:
        """The result; rows of each matrix that was given, and what else `affine` takes."""
        products, partial = list(zip(rows, self._matrices, strict=True)), self._partial
        if partial is None:
            everything = [*self._products, *products]
            if self._later is None or not _gains(everything):
                return affine(everything, self._bias, plus, relu)
            _check_shapes(everything, self._bias, plus)
            return _added_up(everything, self._bias, plus, relu, None, self._later)
        everything = [*self._products, *products]
        _check_shapes(everything, None, plus)
        if self._later is None:
            return _plain(products, None, plus, relu, partial)
        result = _added_up(products, None, plus, relu, partial, self._later)
        return _with_leading(result, everything[0][0])


def _added_up(
    products: Sequence[Product],
    bias: Tensor | None,
    plus: Tensor | None,
    relu: bool,
    partial: Tensor | None = None,
    later: _Left | None = None,
) -> Tensor:
    """`affine` in memory that is used again; added to ``partial`` in place."""
    flat = []
    for x, w in products:
        flat += [_matrix(_cast(x)), _cast(w)]
    bias = None if bias is None else _cast(bias)
    plus = None if plus is None else _matrix(_cast(plus))
    result: Tensor = _Affine.apply(later, relu, bias, plus, partial, *flat)
    return result if partial is not None else _with_leading(result, products[0][0])


def _matrix(rows: Tensor) -> Tensor:
    """Rows in two dimensions.

    No view where they have two: autograd adds nothing to the gradient of a view in place.
    """
    return rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])


def _with_leading(result: Tensor, rows: Tensor) -> Tensor:
    """A result in two dimensions, in the leading ones of the rows that it is of."""
    return result if rows.dim() == 2 else result.view(*rows.shape[:-1], result.shape[-1])


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """What ``layer`` makes of ``x``; see `affine`. What is not `is_plain` is called."""
    if not isinstance(layer, nn.Linear) or not is_plain(layer, nn.Linear):
        result: Tensor = layer(x)
        return result
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
    """Whether the result is large, or takes long, and is of a kind that there are kernels for."""
    x, w = products[0]
    rows = x.shape[:-1].numel()
    is_large = rows * w.shape[1] * 4 >= LARGE_BYTES
    return (is_large or gains(products)) and are_plain([t for pair in products for t in pair])


def are_plain(operands: Sequence[Tensor]) -> bool:
    """Whether they are numbers on the CPU, for which there are kernels."""
    if any(t.device.type != "cpu" or t.layout != torch.strided for t in operands):
        return False
    if not all(t.is_floating_point() for t in operands):
        return False
    if any(type(t) not in (Tensor, nn.Parameter) for t in operands) or _is_transformed():
        return False
    return kernels_for(torch.device("cpu")) is not None


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
    products: Sequence[Product],
    bias: Tensor | None,
    plus: Tensor | None,
    relu: bool,
    partial: Tensor | None = None,
) -> Tensor:
    result, others = partial, list(products)
    if result is None:
        x, w = others.pop(0)
        result = functional.linear(x, w.t(), bias)
    for x, w in others:
        result = result + x @ w
    if plus is not None:
        result = result + plus
    return result.relu() if relu else result


class _Affine(Function):
    """Two-dimensional operands of one dtype.

    With ``later`` the gradients of matrices are left to `_StartAffine`, which finds in it the rows
    and gradients that they are products of; unless they will be differentiated again. Of a matrix
    whose gradient is not asked for nothing is left: `_StartAffine` may not be run.
    """

    @staticmethod
    def forward(
        ctx: Any,
        later: _Left | None,
        relu: bool,
        bias: Tensor | None,
        plus: Tensor | None,
        partial: Tensor | None,
        *flat: Tensor,
    ) -> Tensor:
        if partial is None:
            first, rest = (bias, None) if plus is None else (plus, bias)
        else:
            ctx.mark_dirty(partial)
            first, rest = partial, plus
        out = multiply(_pairs(flat), first, relu=relu and rest is None, out=partial)
        if rest is not None:
            out.add_(rest)
            if relu:
                out.relu_()
        ctx.save_for_backward(*flat, *([out] if relu else []))
        ctx.relu, ctx.later = relu, later
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        _, _, want_bias, want_plus, want_partial, *wanted = ctx.needs_input_grad
        if ctx.relu:
            grad = _where_positive(grad, saved.pop())
        later = None if torch.is_grad_enabled() else ctx.later
        of_operands = _of_operands(saved, wanted, grad, later)
        whole = [grad if want else None for want in (want_plus, want_partial)]
        return None, None, grad.sum(0) if want_bias else None, *whole, *of_operands


class _StartAffine(Function):
    """Products whose rows are here, if there are any, and matrices as they are.

    Backward: the gradients that `_Affine` has left.
    """

    @staticmethod
    def forward(
        ctx: Any,
        later: _Left,
        number: int,
        bias: Tensor | None,
        *operands: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands[:number])
        ctx.later, ctx.number = later, number
        results = [multiply(_pairs(operands[:number]), bias)] if number else []
        return *results, *[w.detach() for w in operands[number:]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        number, of_matrices = ctx.number, list(grads)
        _, _, want_bias, *wanted = ctx.needs_input_grad
        grad = of_matrices.pop(0) if number else None
        of_bias: Tensor | None = None
        of_operands: list[Tensor | None] = [None] * number
        if grad is not None:
            of_bias = grad.sum(0) if want_bias else None
            of_operands = _of_operands(ctx.saved_tensors, wanted[:number], grad, None)
        left = dict(ctx.later)
        ctx.later.clear()
        for i, (x, g) in left.items():
            product, before = multiply_transposed(x, g), of_matrices[i]
            of_matrices[i] = product if before is None else before + product
        return None, None, of_bias, *of_operands, *of_matrices


def _pairs(flat: Sequence[Tensor]) -> list[Product]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _of_operands(
    flat: Sequence[Tensor],
    wanted: Sequence[bool],
    grad: Tensor,
    later: _Left | None,
) -> list[Tensor | None]:
    """Gradients of rows and matrices; in place of those of matrices what is put into ``later``."""
    grads: list[Tensor | None] = []
    if later is not None:
        later.clear()  # what a backward that failed may have left
    for i, (x, w) in enumerate(_pairs(flat)):
        want_x, want_w = wanted[2 * i : 2 * i + 2]
        grads.append(_product(grad, w.t()) if want_x else None)
        grads.append(multiply_transposed(x, grad) if want_w and later is None else None)
        if later is not None and want_w:
            later[i] = x, grad
    return grads


def _where_positive(grad: Tensor, result: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return grad * (result > 0)
    masked = empty_like(grad)
    torch.ops.aten.threshold_backward.grad_input(grad, result, 0, grad_input=masked)
    return masked


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # of a gradient that will be differentiated again
        return rows @ matrix
    return multiply([(rows, matrix)])
