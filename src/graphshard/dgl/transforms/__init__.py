# SPDX-License-Identifier: Apache-2.0
"""Transforms of graphs: functions in `functional`, and classes that can be composed.

The names are those of ``dgl.transforms``.
"""

from . import functional as functional
from .functional import *  # noqa: F403
from .module import *  # noqa: F403
