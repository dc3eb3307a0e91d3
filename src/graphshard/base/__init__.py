# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.base``: markers, names of fields, and the error that graphs raise."""

from ..errors import DGLError
from ..graph import ALL, EID, ETYPE, NID, NTYPE, is_all

__all__ = ["ALL", "EID", "ETYPE", "NID", "NTYPE", "DGLError", "is_all", "is_internal_column"]


def is_internal_column(name: str) -> bool:
    """Whether a field has one of the names under which ids and types are stored."""
    return name in (NID, EID, NTYPE, ETYPE)
