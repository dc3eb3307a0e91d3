# SPDX-License-Identifier: Apache-2.0
"""Names at the places where scripts written for DGL look for them. No process."""

from __future__ import annotations

import importlib

import pytest
import torch

import graphshard as dgl
from graphshard.errors import GraphShardError

PLACES = {
    "nn.pytorch": "SAGEConv GATConv GraphConv HeteroGraphConv SumPooling Set2Set edge_softmax",
    "nn.pytorch.conv": "SAGEConv GATConv GATv2Conv GraphConv GINConv RelGraphConv SGConv APPNPConv",
    "nn.pytorch.glob": "SumPooling AvgPooling MaxPooling SortPooling GlobalAttentionPooling",
    "nn.pytorch.softmax": "edge_softmax",
    "nn.pytorch.hetero": "HeteroGraphConv",
    "nn.pytorch.linear": "TypedLinear",
    "nn.functional": "edge_softmax",
    "nn": "SumPooling pytorch functional",
    "base": "DGLError ALL NID EID NTYPE ETYPE is_all is_internal_column",
    "utils": "expand_as_pair check_eq_shape is_sorted_srcdst",
    "init": "zero_initializer",
    "random": "seed",
    "convert": "graph heterograph to_homogeneous bipartite_from_scipy",
    "backend": "backend_name asnumpy tensor copy_to zeros int64",
    "transforms": "Compose AddSelfLoop GCNNorm functional add_self_loop to_block",
    "transforms.functional": "to_half to_double to_simple_graph",
    "sampling": "random_walk node2vec_random_walk pack_traces sample_neighbors select_topk "
    "sample_labors sample_etype_neighbors sample_neighbors_biased PinSAGESampler "
    "RandomWalkNeighborSampler global_uniform_negative_sampling",
    "dataloading": "DataLoader GraphDataLoader NeighborSampler ShaDowKHopSampler SAINTSampler "
    "ClusterGCNSampler LaborSampler BlockSampler Sampler SpotTarget as_edge_prediction_sampler "
    "DistDataLoader DistNodeDataLoader DistEdgeDataLoader NodeCollator find_exclude_eids",
    "data": "CoraGraphDataset CiteseerGraphDataset PubmedGraphDataset AIFBDataset MUTAGDataset "
    "BGSDataset AMDataset DGLDataset DGLBuiltinDataset MiniGCDataset KarateClubDataset",
    "data.utils": "save_graphs load_graphs save_info load_info split_dataset Subset makedirs",
    "distributed.partition": "load_partition partition_graph RESERVED_FIELD_DTYPE",
    "distributed.graph_partition_book": "RangePartitionBook NodePartitionPolicy HeteroDataName",
    "ops": "segment_reduce segment_mm gather_mm copy_u_sum u_mul_e_sum u_dot_v edge_softmax",
}


@pytest.mark.parametrize("module", PLACES)
def test_names_are_where_dgl_has_them(module: str) -> None:
    found = importlib.import_module(f"graphshard.{module}")
    assert [name for name in PLACES[module].split() if not hasattr(found, name)] == []


def test_graphs_and_errors_have_dgls_names() -> None:
    assert isinstance(dgl.graph(([0], [1]), row_sorted=True), dgl.DGLGraph)
    assert isinstance(dgl.create_block(([0], [1])), dgl.DGLBlock)
    assert issubclass(dgl.DGLError, GraphShardError)
    for call in (
        lambda: dgl.graph(([0], [5]), num_nodes=2),
        lambda: dgl.graph(([0], [1])).find_edges([3]),
        lambda: dgl.graph(([0], [1])).update_all({}, "sum"),
        lambda: dgl.heterograph({("a", "r", "a"): ([], []), ("a", "s", "a"): ([], [])}).edges(),
    ):
        try:
            call()
            pytest.fail("nothing was refused")
        except dgl.DGLError as error:
            assert isinstance(error, ValueError | TypeError)


def test_seeds_decide_what_is_drawn() -> None:
    drawn = []
    for _ in range(2):
        dgl.seed(5)
        drawn.append(dgl.rand_graph(20, 30).edges()[0])
    assert torch.equal(*drawn)


def test_pairs_and_shapes() -> None:
    x, block = torch.ones(3, 2), dgl.create_block(([0, 2], [0, 1]), 3, 2)
    assert dgl.utils.expand_as_pair(x)[1] is x
    assert dgl.utils.expand_as_pair((x, None)) == (x, None)
    assert dgl.utils.expand_as_pair(x, block)[1].shape == (2, 2)
    dgl.utils.check_eq_shape(x)
    with pytest.raises(dgl.DGLError, match="must have one shape"):
        dgl.utils.check_eq_shape((x, torch.ones(3, 3)))
    assert dgl.utils.is_sorted_srcdst(torch.tensor([0, 0, 1]), torch.tensor([1, 0, 2])) == (
        True,
        False,
    )
