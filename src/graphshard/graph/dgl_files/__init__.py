# SPDX-License-Identifier: Apache-2.0
"""DGL's binary files without DGL: graphs (`save_graphs`) and named tensors (`save_tensors`)."""

from ._binary import BinaryReader, StoredTensor, dgl_dtype, reading
from ._graphs import load_graphs, load_labels, open_graphs, save_graphs, stored_graph
from ._stored_graph import StoredGraph
from ._tensors import load_tensors, open_tensors, save_tensors, write_tensor_file
