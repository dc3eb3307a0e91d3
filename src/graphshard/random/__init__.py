# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.random``."""

from ..graph import choice, seed

__all__ = ["choice", "seed"]
