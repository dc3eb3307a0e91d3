# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn.pytorch``: those of `graphshard.dgl.nn`."""

from . import *  # noqa: F403
from . import layers_of_dgl

__getattr__ = layers_of_dgl(__name__)
