# SPDX-License-Identifier: Apache-2.0
"""DGL's binary files without DGL: graphs (`save_graphs`) and named tensors (`save_tensors`)."""

from ._graphs import (
    StoredGraph,
    StoredRelation,
    load_graphs,
    load_labels,
    open_graphs,
    save_graphs,
    stored_graph,
)
from ._tensors import (
    BinaryReader,
    StoredTensor,
    dgl_dtype,
    load_tensors,
    open_tensors,
    reading,
    save_tensors,
    write_tensor_file,
)
