# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.sampling``: frontiers, random walks, and neighbours that walks find often."""

from ...sampling import global_uniform_negative_sampling as global_uniform_negative_sampling
from .frontiers import *  # noqa: F403
from .walks import *  # noqa: F403
