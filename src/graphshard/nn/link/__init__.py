# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs of nodes; the names of ``dgl.nn.pytorch.link``."""

from ._scores import EdgePredictor, TransE, TransR

__all__ = ["EdgePredictor", "TransE", "TransR"]
