# SPDX-License-Identifier: Apache-2.0
"""The files of PyG's ``Partitioner``, read without PyG."""

from ._folder import PyGPart, PyGPartition, is_pyg_folder
from ._pt_file import read_pt
