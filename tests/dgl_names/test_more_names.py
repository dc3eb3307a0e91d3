# SPDX-License-Identifier: Apache-2.0
"""IdMap, GNNExplainer, saving of sparse optimizers, and small names. One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphshard.dgl as gs
from dgl_peer import dgl

RANGES = {
    "a": [[0, 3], [8, 8], [13, 15]],
    "b": [[3, 4], [8, 10], [15, 15]],
    "c": [[4, 8], [10, 13], [15, 21]],
}


@pytest.mark.parametrize("names", ["abc", "cba"])
def test_id_map_is_dgls(names: str) -> None:
    given = {name: np.array(RANGES[name]) for name in names}
    ids = torch.randperm(21)
    mine = gs.distributed.id_map.IdMap({k: torch.from_numpy(v) for k, v in given.items()})(ids)
    theirs = dgl.distributed.id_map.IdMap(given)(ids)
    for ours, its in zip(mine, theirs, strict=True):
        assert torch.equal(ours, its)


class Model(nn.Module):
    """Explained by both: one layer, of the sum of the neighbours."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library, self.linear = library, nn.Linear(4, 3)

    def forward(self, graph: Any, feat: Any, eweight: Any = None, shift: Any = 0) -> Any:
        with graph.local_scope():
            fn = self.library.function
            graph.ndata["h"] = self.linear(feat) + shift
            graph.edata["w"] = torch.ones(graph.num_edges()) if eweight is None else eweight
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "h"))
            return graph.ndata["h"]


def test_explanations_are_dgls(capsys: Any) -> None:
    torch.manual_seed(0)
    src, dst, x = torch.randint(12, (40,)), torch.randint(12, (40,)), torch.rand(12, 4)
    shift, models = torch.rand(12, 3), [Model(gs), Model(dgl)]
    models[1].load_state_dict(models[0].state_dict())
    results = []
    for library, model in zip((gs, dgl), models, strict=True):
        g = library.graph((src, dst), num_nodes=12)
        explainer = library.nn.GNNExplainer(model, 1, num_epochs=20, log=library is gs)
        torch.manual_seed(1)
        place, near, *masks = explainer.explain_node(5, g, x, shift=shift)
        of_graph = explainer.explain_graph(g, x)
        results.append([place, near.ndata[library.NID], *masks, *of_graph])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert capsys.readouterr().out.startswith("Explained in 20 steps, loss ")


@pytest.mark.parametrize("kind", ["SparseAdagrad", "SparseAdam"])
def test_sparse_optimizers_are_saved(kind: str, tmp_path: Path) -> None:
    gs.distributed.partition_graph(gs.rand_graph(10, 20), "saved", 1, tmp_path)
    gs.distributed.DistGraph("saved", part_config=tmp_path / "saved.json")
    made = []
    for name in ("first", "second"):
        embedding = gs.distributed.DistEmbedding(10, 3, f"{kind}-{name}")
        made.append((embedding, getattr(gs.optim, kind)([embedding], 0.1)))
    (embedding, optimizer), (_, other) = made
    embedding(torch.tensor([1, 4, 7])).sum().backward()
    optimizer.step()
    optimizer.save(tmp_path / "state")
    saved = [tensor[torch.arange(len(tensor))] for tensor in optimizer.tensors()[1:]]
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizer.load(tmp_path / "state")
    for tensor, rows in zip(optimizer.tensors()[1:], saved, strict=True):
        assert torch.equal(tensor[torch.arange(len(tensor))], rows)
    assert optimizer._num_steps == [1]
    with pytest.raises(ValueError, match="must have embeddings"):
        other.load(tmp_path / "state")
    gs.distributed.exit_client()


def test_small_names() -> None:
    shared = gs.multiprocessing.shared_tensor(3, 2, dtype=torch.int32)
    assert shared.is_shared()
    assert (shared.shape, shared.dtype) == ((3, 2), torch.int32)
    assert gs.multiprocessing.shared_tensor((2,)).shape == (2,)
    rows = gs.utils.gather_pinned_tensor_rows(torch.arange(6).view(3, 2), torch.tensor([2, 0]))
    assert rows.tolist() == [[4, 5], [0, 1]]
    assert gs.frame.zero_initializer is gs.init.zero_initializer
    assert gs._ffi.base.DGLError is gs.DGLError
    assert gs.distributed.GraphPartitionBook is gs.distributed.PartitionBook
