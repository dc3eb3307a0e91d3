# SPDX-License-Identifier: Apache-2.0
"""Partition folders as ``dgl.distributed.partition_graph`` writes them, without DGL."""

from ._part_file import DGL_PART_FILES, DGLPartFile
from ._relations import find_relations
