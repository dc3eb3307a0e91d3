# SPDX-License-Identifier: Apache-2.0
"""Parameters by type: a matrix, a table of rows or a linear layer per node type or relation.

`TypedLinear` takes types as numbers. Rows are put in order of type, and each run of one type is one
dense product. Memory is that of the input and output rows; a tensor of size rows x in x out never
exists. `HeteroEmbedding` and `HeteroLinear` take rows in a dictionary, by type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from .._base.typing import CanonicalEType, EType
from ..ops import affine


class TypedLinear(nn.Module):
    r"""Linear map by type, :math:`y_n = x_n W_{t(n)}`.

    With the two ways of sharing weights of `Modeling Relational Data with Graph Convolutional
    Networks <https://arxiv.org/abs/1703.06103>`_:

    * ``regularizer=None``: every type owns its matrix.
    * ``basis``: :math:`W_t = \sum_{b=1}^{B} a_{tb} V_b`.
    * ``bdd``: :math:`W_t` is block diagonal, with :math:`B` blocks of size
      (in_size / B) x (out_size / B).

    Args:
        num_bases: :math:`B`; required by both regularizers, and for ``bdd`` a divisor of both
            widths.

    Shape:
        ``x`` ``[num_rows, in_size]``; ``x_type`` ``[num_rows]``, integers in
        ``[0, num_types)``; output ``[num_rows, out_size]``.

    Raises:
        ValueError: Unknown regularizer; ``num_bases`` missing or not a divisor; types of wrong
            shape or out of range.

    Example:
        >>> import torch
        >>> from graphshard.nn import TypedLinear
        >>> layer = TypedLinear(8, 4, num_types=3, regularizer="basis", num_bases=2)
        >>> layer(torch.ones(5, 8), torch.tensor([0, 2, 1, 0, 2])).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        num_types: int,
        regularizer: Literal["basis", "bdd"] | None = None,
        num_bases: int | None = None,
    ) -> None:
        super().__init__()
        if regularizer not in (None, "basis", "bdd"):
            raise ValueError(f"regularizer must be None, 'basis' or 'bdd' (got {regularizer!r})")
        if regularizer is not None and (num_bases is None or num_bases < 1):
            raise ValueError(
                f"regularizer {regularizer!r} needs num_bases, at least 1 (got {num_bases})"
            )
        self.in_size = in_size
        self.out_size = out_size
        self.num_types = num_types
        self.regularizer = regularizer
        self.num_bases = num_bases
        if regularizer is None or num_bases is None:
            self.W = nn.Parameter(torch.empty(num_types, in_size, out_size))
        elif regularizer == "basis":
            self.W = nn.Parameter(torch.empty(num_bases, in_size, out_size))
            self.coeff = nn.Parameter(torch.empty(num_types, num_bases))
        elif in_size % num_bases or out_size % num_bases:
            raise ValueError(
                "num_bases must divide in_size and out_size for regularizer 'bdd' (got "
                f"num_bases={num_bases}, in_size={in_size}, out_size={out_size})"
            )
        else:
            self.submat_in, self.submat_out = in_size // num_bases, out_size // num_bases
            size_of_blocks = num_bases * self.submat_in * self.submat_out
            self.W = nn.Parameter(torch.empty(num_types, size_of_blocks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: uniform in one over the root of the width; coefficients Xavier."""
        width = self.submat_in if self.regularizer == "bdd" else self.in_size
        bound = 1 / math.sqrt(width)
        nn.init.uniform_(self.W, -bound, bound)
        if self.regularizer == "basis":
            nn.init.xavier_uniform_(self.coeff, gain=nn.init.calculate_gain("relu"))

    def get_weight(self) -> Tensor:
        """One matrix per type: ``[num_types, in_size, out_size]``.

        For ``bdd`` the blocks of each type in a row: ``[num_types, in_size * out_size / B]``.
        """
        if self.regularizer == "basis":
            return (self.coeff @ self.W.flatten(1)).view(-1, self.in_size, self.out_size)
        return self.W

    def _multiply(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Rows of one type ``[n, in_size]`` times that type's entry of ``get_weight``."""
        if self.regularizer != "bdd":
            return affine([(rows, weight)])
        assert self.num_bases is not None
        blocks = weight.view(self.num_bases, self.submat_in, self.submat_out)
        rows = rows.view(-1, self.num_bases, self.submat_in)
        return torch.bmm(rows.transpose(0, 1), blocks).transpose(0, 1).flatten(1)

    def forward(self, x: Tensor, x_type: Tensor, sorted_by_type: bool = False) -> Tensor:
        """Multiply each row by its type's matrix; see the class for shapes.

        Args:
            sorted_by_type: Accepted so that calls written for DGL run; has no effect. Rows that
                are in order of type are recognised, and then not moved.
        """
        if x_type.shape != x.shape[:1]:
            raise ValueError(
                f"x_type needs one type per row: shape ({x.shape[0]},) (got {tuple(x_type.shape)})"
            )
        if x_type.numel() == 0:
            if self.num_types == 0:
                return x.new_empty(0, self.out_size)
            return self._multiply(x, self.get_weight()[0])
        check_types(x_type, self.num_types)
        order: Tensor | None = None
        if not bool((x_type[1:] >= x_type[:-1]).all()):
            order = torch.argsort(x_type, stable=True)
            x = x.index_select(0, order)
        sizes = torch.bincount(x_type, minlength=self.num_types).tolist()
        parts = [
            self._multiply(rows, weight)
            for rows, weight in zip(x.split(sizes), self.get_weight().unbind(0), strict=True)
            if rows.shape[0]
        ]
        y = torch.cat(parts) if len(parts) > 1 else parts[0]
        if order is None:
            return y
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return y.index_select(0, back)

    def extra_repr(self) -> str:
        text = f"in_size={self.in_size}, out_size={self.out_size}, num_types={self.num_types}"
        if self.regularizer is None:
            return text
        return f"{text}, regularizer={self.regularizer!r}, num_bases={self.num_bases}"


def check_types(types: Tensor, num_types: int) -> None:
    """Raise ValueError unless every type is in ``[0, num_types)``."""
    if types.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(types))
    if low < 0 or high >= num_types:
        raise ValueError(f"types must lie in [0, {num_types}) (got {low if low < 0 else high})")


_EMPTY = nn.ModuleDict()


def module_name(kind: str | CanonicalEType) -> str:
    """The name of a type's module in a ``ModuleDict``.

    That is the type itself, as long as torch takes it: a name with a dot, such as an IRI, or one
    that every ``ModuleDict`` has already, such as ``type`` and ``items``, is written otherwise.
    """
    name = str(kind)
    if "." in name or "%" in name:
        return name.replace("%", "%25").replace(".", "%2E")
    return f"%{name}" if hasattr(_EMPTY, name) else name


class HeteroEmbedding(nn.Module):
    """Tables of learned rows, by node type or relation, all of one width.

    Args:
        num_embeddings: Type to its number of rows.

    Raises:
        ValueError: A number of rows that is negative.

    Example:
        >>> import torch
        >>> from graphshard.nn import HeteroEmbedding
        >>> layer = HeteroEmbedding({"user": 2, ("user", "follows", "user"): 3}, 4)
        >>> layer.weight["user"].shape
        torch.Size([2, 4])
        >>> layer({"user": torch.tensor([1, 1, 0])})["user"].shape
        torch.Size([3, 4])
    """

    def __init__(
        self, num_embeddings: Mapping[str | CanonicalEType, int], embedding_dim: int
    ) -> None:
        super().__init__()
        for kind, rows in num_embeddings.items():
            if int(rows) < 0:
                raise ValueError(f"a table must have 0 rows or more (got {int(rows)} for {kind})")
        self.embeds = nn.ModuleDict(
            {
                module_name(kind): nn.Embedding(int(n), embedding_dim)
                for kind, n in num_embeddings.items()
            }
        )
        self.raw_keys = {str(kind): kind for kind in num_embeddings}

    @property
    def weight(self) -> dict[EType, Tensor]:
        """Type to its whole table, ``[rows, embedding_dim]``."""
        return {kind: self._table(kind).weight for kind in self.raw_keys.values()}

    def reset_parameters(self) -> None:
        """Draw all tables anew, uniform after Glorot."""
        for table in self.weight.values():
            nn.init.xavier_uniform_(table)

    def forward(self, input_ids: Mapping[EType, Tensor]) -> dict[EType, Tensor]:
        """Rows of the tables.

        Args:
            input_ids: Type to row numbers, any shape.

        Returns:
            Type to ``[*ids, embedding_dim]``.
        """
        return {kind: self._table(kind)(ids) for kind, ids in input_ids.items()}

    def _table(self, kind: EType) -> nn.Embedding:
        table = self.embeds[module_name(kind)]
        assert isinstance(table, nn.Embedding)
        return table


class HeteroLinear(nn.Module):
    """Linear layers, by node type or relation, all of one output width.

    Args:
        in_size: Type to the width of its input rows.

    Example:
        >>> import torch
        >>> layer = HeteroLinear({"user": 1, ("user", "follows", "user"): 2}, 3)
        >>> layer({"user": torch.ones(2, 1)})["user"].shape
        torch.Size([2, 3])
    """

    def __init__(
        self, in_size: Mapping[str | CanonicalEType, int], out_size: int, bias: bool = True
    ) -> None:
        super().__init__()
        self.linears = nn.ModuleDict(
            {
                module_name(kind): nn.Linear(width, out_size, bias=bias)
                for kind, width in in_size.items()
            }
        )

    def forward(self, feat: Mapping[EType, Tensor]) -> dict[EType, Tensor]:
        """Type -> ``[..., out_size]`` of type -> ``[..., in_size]``."""
        return {kind: self.linears[module_name(kind)](rows) for kind, rows in feat.items()}
