# SPDX-License-Identifier: Apache-2.0
"""DGL's binary files under the names of ``dgl.data.utils``; read and written without DGL.

``save_info`` and ``load_info`` are not here: DGL pickles what they hold, and reading a pickle runs
what is in it. Keep such values as JSON, or as tensors with `save_tensors`.
"""

from ..graph import load_graphs, load_labels, load_tensors, save_graphs, save_tensors

__all__ = ["load_graphs", "load_labels", "load_tensors", "save_graphs", "save_tensors"]
