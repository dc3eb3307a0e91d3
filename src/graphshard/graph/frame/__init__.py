# SPDX-License-Identifier: Apache-2.0
"""Feature columns of nodes and edges, and the views that user code sees."""

from ._columns import NamedColumn, NameTable, integer_ids, names_column, tensor_column
from ._frame import Frame, Initializer, OverlayView, RowsView, Scheme, version_of
from ._lazy import LazyRows
from ._views import EdgeSpaceView, FrameView, NodeSpaceView, TypedFrameView
