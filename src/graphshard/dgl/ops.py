# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.ops``: those of `graphshard.ops`."""

from ..ops import *  # noqa: F403
