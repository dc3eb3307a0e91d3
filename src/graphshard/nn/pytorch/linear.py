# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch.linear``."""

from .._typed_linear import TypedLinear

__all__ = ["TypedLinear"]
