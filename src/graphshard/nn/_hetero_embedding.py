# SPDX-License-Identifier: Apache-2.0
"""Learned rows, or a linear layer, per node type or relation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .._base.typing import CanonicalEType

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
        embedding_dim: Width of a row.

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
    def weight(self) -> dict[Any, Tensor]:
        """Type to its whole table, ``[rows, embedding_dim]``."""
        return {kind: self._table(kind).weight for kind in self.raw_keys.values()}

    def reset_parameters(self) -> None:
        """Draw all tables anew, uniform after Glorot."""
        for table in self.weight.values():
            nn.init.xavier_uniform_(table)

    def forward(self, input_ids: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Rows of the tables.

        Args:
            input_ids: Type to row numbers, any shape.

        Returns:
            Type to ``[*ids, embedding_dim]``.
        """
        return {kind: self._table(kind)(ids) for kind, ids in input_ids.items()}

    def _table(self, kind: Any) -> nn.Embedding:
        table = self.embeds[module_name(kind)]
        assert isinstance(table, nn.Embedding)
        return table


class HeteroLinear(nn.Module):
    """Linear layers, by node type or relation, all of one output width.

    Args:
        in_size: Type to the width of its input rows.
        out_size: Width of an output row.
        bias: Whether the layers have a bias.

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

    def forward(self, feat: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Type -> ``[..., out_size]`` of type -> ``[..., in_size]``."""
        return {kind: self.linears[module_name(kind)](rows) for kind, rows in feat.items()}
