# SPDX-License-Identifier: Apache-2.0
"""Names at the places where scripts written for DGL look for them. No process."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from dgl_names_cases import MODULES, listed, missing

import graphshard.dgl as dgl
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
    "heterograph": "DGLGraph DGLBlock",
    "nn.pytorch.conv.gatconv": "GATConv edge_softmax",
    "nn.pytorch.conv.graphconv": "GraphConv EdgeWeightNorm",
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
    "data.utils": "save_graphs load_graphs save_info load_info split_dataset Subset makedirs "
    "download extract_archive get_download_dir _get_dgl_url check_sha1 loadtxt",
    "data.tu": "TUDataset LegacyTUDataset",
    "data.ppi": "PPIDataset LegacyPPIDataset",
    "data.knowledge_graph": "FB15k237Dataset load_data",
    "data.tree": "SSTDataset",
    "data.adapter": "AsNodePredDataset AsLinkPredDataset AsGraphPredDataset",
    "nn.pytorch.utils": "Identity WeightBasis LabelPropagation JumpingKnowledge Sequential",
    "nn.pytorch.explain": "GNNExplainer",
    "nn.pytorch.conv.chebconv": "ChebConv",
    "optim": "SparseAdagrad SparseAdam",
    "distributed": "GraphPartitionBook DistGraph",
    "distributed.id_map": "IdMap",
    "multiprocessing": "shared_tensor Process",
    "frame": "zero_initializer",
    "_ffi.base": "DGLError",
    "distributed.partition": "load_partition partition_graph RESERVED_FIELD_DTYPE",
    "distributed.graph_partition_book": "RangePartitionBook NodePartitionPolicy HeteroDataName",
    "data.citation_graph": "CoraGraphDataset load_cora load_citeseer load_pubmed",
    "data.rdf": "AIFBDataset MUTAGDataset",
    "dataloading.negative_sampler": "Uniform PerSourceUniform GlobalUniform",
    "dataloading.neighbor_sampler": "NeighborSampler MultiLayerFullNeighborSampler",
    "sampling.randomwalks": "random_walk pack_traces",
    "distributed.optim": "SparseAdam SparseAdagrad",
    "ops.sddmm": "gsddmm u_dot_v",
    "ops": "segment_reduce segment_mm gather_mm copy_u_sum u_mul_e_sum u_dot_v edge_softmax",
}


@pytest.mark.parametrize("module", PLACES)
def test_names_are_where_dgl_has_them(module: str) -> None:
    found = importlib.import_module(f"graphshard.dgl.{module}")
    assert [name for name in PLACES[module].split() if not hasattr(found, name)] == []


def test_heterograph_is_a_function_and_to_imports_a_module() -> None:
    from graphshard.dgl.heterograph import DGLBlock, DGLGraph  # type: ignore[import-not-found]

    assert isinstance(dgl.heterograph({("a", "r", "a"): ([0], [0])}), DGLGraph)
    assert isinstance(dgl.create_block(([0], [1])), DGLBlock)


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


@pytest.mark.parametrize("place", MODULES)
def test_the_page_lists_what_is_not_here(place: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("dgl", reason="DGL is the oracle, and has no release for this Python")
        assert missing(place) == listed().get(place, set())


def test_the_page_has_no_other_place() -> None:
    assert set(listed()) <= set(MODULES)


def test_layers_that_dgl_alone_has_are_dgls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = pytest.importorskip("dgl", reason="DGL is the oracle, and has no release for all")
    torch.manual_seed(0)
    layer = dgl.nn.GCN2Conv(4, 1)
    assert isinstance(layer, real.nn.GCN2Conv)
    edges, x = ([0, 1, 2, 0], [1, 2, 0, 2]), torch.rand(3, 4)
    torch.testing.assert_close(layer(dgl.graph(edges), x, x), layer(real.graph(edges), x, x))
    with pytest.raises(AttributeError, match="where DGL is installed"):
        getattr(dgl.nn.pytorch, "NoSuch" + "Conv")


def test_modules_without_a_file_hold_the_same_objects() -> None:
    for place, name in (
        ("readout", "sum_nodes"),
        ("subgraph", "node_subgraph"),
        ("mpops", "copy_u"),
    ):
        module = importlib.import_module(f"graphshard.dgl.{place}")
        assert getattr(module, name) is getattr(dgl, name)
    batch = importlib.import_module("graphshard.dgl.batch")
    g = dgl.graph(([0], [1]))
    assert dgl.batch is batch.batch  # the function, not the module
    assert batch([g, g]).batch_size == 2
    assert importlib.import_module("graphshard.dgl.multiprocessing").Queue


def test_small_layers_are_dgls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = pytest.importorskip("dgl", reason="DGL is the oracle, and has no release for all")
    torch.manual_seed(0)
    h, t, rels = torch.rand(5, 4), torch.rand(5, 4), torch.tensor([0, 2, 1, 0, 1])
    outputs = [torch.rand(5, 4) for _ in range(3)]
    types = {"a": 4, ("a", "r", "b"): 4}
    cases = [
        ("HeteroLinear", (types, 3), ({"a": h, ("a", "r", "b"): t},)),
        ("JumpingKnowledge", ("cat",), (outputs,)),
        ("JumpingKnowledge", ("max",), (outputs,)),
        ("JumpingKnowledge", ("lstm", 4, 3), (outputs,)),
        ("TransE", (3, 4), (h, t, rels)),
        ("TransR", (3, 2, 4, 2), (h, t, rels)),
        *(("EdgePredictor", (op, *more), (h, t)) for op in ("dot", "cos", "ele", "cat")
          for more in ((), (4, 3, True))),
    ]  # fmt: skip
    for name, made_of, given in cases:
        mine, theirs = getattr(dgl.nn, name)(*made_of), getattr(real.nn, name)(*made_of)
        theirs.load_state_dict(mine.state_dict())
        torch.testing.assert_close(mine(*given), theirs(*given))
    with pytest.raises(ValueError, match="op must be one of"):
        dgl.nn.EdgePredictor("other")
    with pytest.raises(ValueError, match="needs in_feats"):
        dgl.nn.JumpingKnowledge("lstm")
    conv, g = dgl.nn.GraphConv(4, 4), dgl.graph(([0, 1, 2], [1, 2, 0]))
    stack, x = dgl.nn.pytorch.Sequential(conv, conv), torch.rand(3, 4)
    torch.testing.assert_close(stack(g, x), conv(g, conv(g, x)))
    torch.testing.assert_close(stack([g, g], x), conv(g, conv(g, x)))
