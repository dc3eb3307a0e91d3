# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch.hetero``."""

from .._hetero_embedding import HeteroEmbedding, HeteroLinear
from ..conv import HeteroGraphConv

__all__ = ["HeteroEmbedding", "HeteroGraphConv", "HeteroLinear"]
