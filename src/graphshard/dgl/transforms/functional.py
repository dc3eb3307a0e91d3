# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.transforms.functional``."""

from ...graph import add_edges as add_edges
from ...graph import add_nodes as add_nodes
from ...graph import add_reverse_edges as add_reverse_edges
from ...graph import add_self_loop as add_self_loop
from ...graph import remove_edges as remove_edges
from ...graph import remove_nodes as remove_nodes
from ...graph import remove_self_loop as remove_self_loop
from ...graph import reverse as reverse
from ...graph import to_bidirected as to_bidirected
from ...graph import to_block as to_block
from ...graph import to_simple as to_simple
from ..graphs._compaction import *  # noqa: F403
from ..graphs._encodings import *  # noqa: F403
from ..graphs._order import *  # noqa: F403
from ..graphs._points import *  # noqa: F403
from ..graphs._products import *  # noqa: F403
from ..graphs._tags import *  # noqa: F403
from ._partition import *  # noqa: F403
from ._partition import reorder_nodes as reorder_nodes
