# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.random``."""

from ..graph import seed

__all__ = ["seed"]
