# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.function``: those of `graphshard.function`."""

from ..function import *  # noqa: F403
