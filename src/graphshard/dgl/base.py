# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.base``: markers, names of fields, and the error that graphs raise."""

import warnings

from ..errors import DGLError, DGLWarning
from ..graph import ALL, EID, ETYPE, NID, NTYPE, is_all

__all__ = [
    "ALL", "EID", "ETYPE", "NID", "NTYPE", "DGLError", "DGLWarning", "dgl_warning", "is_all",
    "is_internal_column",
]  # fmt: skip


def is_internal_column(name: str) -> bool:
    """Whether a field has one of the names under which ids and types are stored."""
    return name in (NID, EID, NTYPE, ETYPE)


def dgl_warning(message: str, category: type[Warning] = DGLWarning, stacklevel: int = 2) -> None:
    """Warn."""
    warnings.warn(message, category, stacklevel=stacklevel + 1)
