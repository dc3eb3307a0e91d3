# SPDX-License-Identifier: Apache-2.0
"""StandIn: what an object needs that stands for a tensor, besides its rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class StandIn:
    """Answers a tensor's questions about its shape, and sends the rest to ``__torch_function__``.

    Functions of torch find that method by themselves; methods and operators of a tensor come from
    here.
    """

    #: What error messages call it.
    what = "a stand-in"

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Of the tensor that it stands for."""

    @classmethod
    @abstractmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, which was given at least one of these."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(f"{type(self).what} have no attribute '{name}'")

        def call(*args: Any, **kwargs: Any) -> Any:
            return type(self).__torch_function__(method, (), (self, *args), kwargs)

        return call


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def call(self: StandIn, *args: Any) -> Any:
        return type(self).__torch_function__(method, (), (self, *args), {})

    call.__name__ = name
    return call


for _name in """__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__
    __neg__ __pow__ __rpow__ __matmul__ __abs__ __getitem__ __eq__ __ne__ __lt__ __le__ __gt__
    __ge__""".split():
    setattr(StandIn, _name, _operator(_name))
StandIn.__hash__ = object.__hash__  # type: ignore[method-assign]
