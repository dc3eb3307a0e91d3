# SPDX-License-Identifier: Apache-2.0
"""InputDropout: dropout on input features at the price of their non-zeros.

Bag-of-words features are a hundred zeros to one number, and dropping a zero changes nothing. So
random numbers are drawn for the non-zeros alone, whose places are found once.
"""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_DENSITY = 0.2
"""Above this share of non-zeros plain dropout is as fast."""


class InputDropout(nn.Module):
    """Dropout for a tensor that is the same object in every step and needs no gradient.

    Any other tensor is treated as ``nn.Dropout`` does. The distribution is the same; the random
    numbers are not.

    Args:
        p: Probability.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._source: weakref.ref[Tensor] | None = None
        self._version = -1
        self._places: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with elements set to zero at random and the others scaled, while training."""
        if not self.training or self.p == 0.0 or x.requires_grad or not x.is_contiguous():
            return F.dropout(x, self.p, self.training)
        places = self._nonzeros(x)
        if places is None:
            return F.dropout(x, self.p)
        out = torch.zeros_like(x)
        out.view(-1)[places] = F.dropout(x.view(-1)[places], self.p)
        return out

    def _nonzeros(self, x: Tensor) -> Tensor | None:
        """Flat places of the non-zeros; None if there are too many."""
        if self._source is None or self._source() is not x or self._version != x._version:
            self._source, self._version = weakref.ref(x), x._version
            dense = int(torch.count_nonzero(x)) > MAX_DENSITY * x.numel()
            self._places = None if dense else x.view(-1).nonzero().view(-1)
        return self._places

    def extra_repr(self) -> str:
        return f"p={self.p}"
