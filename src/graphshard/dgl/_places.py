# SPDX-License-Identifier: Apache-2.0
"""Modules under the names that DGL has for them: ``dgl.readout``, ``dgl.geometry`` and others.

Scripts import names from the modules in which DGL keeps them. Where this package keeps them
elsewhere, there is a module of DGL's name that holds the same objects and has no file.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# DGL's module: where its names are here, and the names; of several origins, after semicolons.
MODULES = {
    "batch": ". batch slice_batch unbatch",
    "convert": ". bipartite_from_networkx bipartite_from_scipy block_to_graph create_block "
    "from_networkx from_scipy graph heterograph to_heterogeneous to_homogeneous to_networkx",
    "frame": "init zero_initializer",
    "_ffi": "base DGLError",
    "_ffi.base": "base DGLError",
    "generators": ". rand_bipartite rand_graph",
    "geometry": "graphs._points farthest_point_sampler neighbor_matching",
    "global_config": "utils is_libxsmm_enabled use_libxsmm",
    "heterograph": ". Block DGLBlock=Block DGLGraph=Graph DGLHeteroGraph=Graph heterograph",
    "homophily": ". edge_homophily linkx_homophily node_homophily",
    "merge": ". merge",
    "mpops": ". copy_u copy_v u_add_v u_div_v u_dot_v u_mul_v u_sub_v",
    "multiprocessing": "torch.multiprocessing Barrier Condition Event JoinableQueue Lock Manager "
    "Pipe Pool Process Queue RLock Semaphore SimpleQueue Value cpu_count current_process "
    "get_context get_start_method set_start_method spawn; utils shared_tensor",
    "propagate": ". prop_edges prop_edges_dfs prop_nodes prop_nodes_bfs prop_nodes_topo",
    "random": "graphs._random choice seed",
    "readout": ". broadcast_edges broadcast_nodes max_edges max_nodes mean_edges mean_nodes "
    "readout_edges readout_nodes softmax_edges softmax_nodes sum_edges sum_nodes topk_edges "
    "topk_nodes",
    "subgraph": ". edge_subgraph edge_type_subgraph in_subgraph khop_in_subgraph "
    "khop_out_subgraph node_subgraph node_type_subgraph out_subgraph",
    "traversal": ". bfs_edges_generator bfs_nodes_generator dfs_edges_generator "
    "dfs_labeled_edges_generator topological_nodes_generator",
    "udf": ". EdgeBatch NodeBatch",
    "partition": "transforms metis_partition metis_partition_assignment "
    "partition_graph_with_halo reorder_nodes",
    "function.message": "function copy_e copy_u u_add_v u_div_v u_dot_v u_mul_v u_sub_v u_add_e "
    "u_div_e u_dot_e u_mul_e u_sub_e",
    "function.reducer": "function max mean min sum",
    "data.adapter": "data AsGraphPredDataset AsLinkPredDataset AsNodePredDataset",
    "data.flickr": "data FlickrDataset",
    "data.fraud": "data FraudAmazonDataset FraudDataset FraudYelpDataset",
    "data.gindt": "data GINDataset",
    "data.gnn_benchmark": "data AmazonCoBuyComputerDataset AmazonCoBuyPhotoDataset "
    "CoauthorCSDataset CoauthorPhysicsDataset CoraFullDataset",
    "data.karate": "data KarateClub KarateClubDataset",
    "data.knowledge_graph": "data.one_graph FB15k237Dataset FB15kDataset KnowledgeGraphDataset "
    "WN18Dataset load_data=load_knowledge_graph",
    "data.minigc": "data MiniGCDataset",
    "data.ppi": "data LegacyPPIDataset PPIDataset",
    "data.qm9": "data QM9 QM9Dataset",
    "data.qm9_edge": "data QM9Edge QM9EdgeDataset",
    "data.reddit": "data RedditDataset",
    "data.sbm": "data SBMMixture SBMMixtureDataset",
    "data.synthetic": "data BACommunityDataset BAShapeDataset TreeCycleDataset TreeGridDataset",
    "data.tree": "data SST SSTDataset",
    "data.tu": "data LegacyTUDataset TUDataset",
    "data.wikics": "data WikiCSDataset",
    "data.yelp": "data YelpDataset",
    "dataloading.base": "dataloading BlockSampler EdgePredictionSampler Sampler "
    "as_edge_prediction_sampler find_exclude_eids",
    "dataloading.neighbor_sampler": "dataloading MultiLayerFullNeighborSampler "
    "MultiLayerNeighborSampler NeighborSampler",
    "dataloading.cluster_gcn": "dataloading ClusterGCNSampler",
    "dataloading.shadow": "dataloading ShaDowKHopSampler",
    "dataloading.graphsaint": "dataloading SAINTSampler",
    "dataloading.dataloader": "dataloading DataLoader GraphCollator GraphDataLoader",
    "dataloading.spot_target": "dataloading SpotTarget",
    "sampling.neighbor": "sampling sample_etype_neighbors sample_neighbors "
    "sample_neighbors_biased sample_neighbors_fused select_topk",
    "sampling.randomwalks": "sampling pack_traces random_walk",
    "sampling.pinsage": "sampling PinSAGESampler RandomWalkNeighborSampler",
    "sampling.negative": "sampling global_uniform_negative_sampling",
    "sampling.node2vec_randomwalk": "sampling node2vec_random_walk",
    "sampling.labor": "sampling sample_labors",
    "distributed.dist_graph": "distributed DistGraph edge_split node_split",
    "distributed.dist_tensor": "distributed DistTensor",
    "distributed.dist_dataloader": "distributed DistDataLoader",
    "distributed.id_map": "distributed IdMap",
    "distributed.nn": "distributed DistEmbedding",
    "distributed.optim": "distributed SparseAdagrad SparseAdam",
    "distributed.dist_context": "distributed exit_client initialize",
    "ops.spmm": "ops copy_e_max copy_e_mean copy_e_min copy_e_sum copy_u_max copy_u_mean "
    "copy_u_min copy_u_sum u_add_e_max u_add_e_mean u_add_e_min u_add_e_sum u_div_e_max "
    "u_div_e_mean u_div_e_min u_div_e_sum u_mul_e_max u_mul_e_mean u_mul_e_min u_mul_e_sum "
    "u_sub_e_max u_sub_e_mean u_sub_e_min u_sub_e_sum",
    "ops.sddmm": "ops copy_e copy_u copy_v e_add_u e_add_v e_div_u e_div_v e_dot_u e_dot_v "
    "e_mul_u e_mul_v e_sub_u e_sub_v gsddmm u_add_e u_add_v u_div_e u_div_v u_dot_e u_dot_v "
    "u_mul_e u_mul_v u_sub_e u_sub_v v_add_e v_add_u v_div_e v_div_u v_dot_e v_dot_u v_mul_e "
    "v_mul_u v_sub_e v_sub_u",
    "ops.edge_softmax": "ops edge_softmax",
    "ops.segment": "ops segment_mm segment_reduce segment_softmax",
    "transforms.module": "transforms AddEdge AddMetaPaths AddReverse AddSelfLoop BaseTransform "
    "Compose DropEdge DropNode FeatMask GCNNorm GDC HeatKernel KHopGraph LapPE LaplacianPE "
    "LineGraph NodeShuffle PPR RandomWalkPE RemoveSelfLoop RowFeatNormalizer SIGNDiffusion SVDPE "
    "ToLevi ToSimple",
    "nn.functional": "nn edge_softmax",
    "nn.glob": "nn AvgPooling GlobalAttentionPooling MaxPooling Set2Set SortPooling SumPooling "
    "WeightAndSum",
    "nn.pytorch.glob": "nn AvgPooling GlobalAttentionPooling MaxPooling Set2Set SortPooling "
    "SumPooling WeightAndSum",
    "nn.pytorch.hetero": "nn HeteroEmbedding HeteroGraphConv HeteroLinear",
    "nn.pytorch.linear": "nn TypedLinear",
    "nn.pytorch.softmax": "nn edge_softmax",
    "nn.pytorch.conv": "nn AGNNConv APPNPConv ChebConv DotGatConv EdgeConv EdgeWeightNorm GATConv "
    "GATv2Conv GINConv GINEConv GMMConv GatedGraphConv GraphConv NNConv RelGraphConv SAGEConv "
    "SGConv TAGConv",
    "nn.pytorch.factory": "nn KNNGraph RadiusGraph SegmentedKNNGraph knn_graph "
    "radius_graph segmented_knn_graph",
    "nn.pytorch.link": "nn EdgePredictor TransE TransR",
    "nn.pytorch.utils": "nn Identity JumpingKnowledge LabelPropagation Sequential WeightBasis",
    "nn.pytorch.explain": "nn GNNExplainer",
    "nn.pytorch.conv.agnnconv": "nn AGNNConv edge_softmax",
    "nn.pytorch.conv.appnpconv": "nn APPNPConv",
    "nn.pytorch.conv.chebconv": "nn ChebConv",
    "nn.pytorch.conv.dotgatconv": "nn DotGatConv edge_softmax",
    "nn.pytorch.conv.edgeconv": "nn EdgeConv",
    "nn.pytorch.conv.gatconv": "nn GATConv edge_softmax",
    "nn.pytorch.conv.gatv2conv": "nn GATv2Conv edge_softmax",
    "nn.pytorch.conv.gatedgraphconv": "nn GatedGraphConv",
    "nn.pytorch.conv.ginconv": "nn GINConv",
    "nn.pytorch.conv.gineconv": "nn GINEConv",
    "nn.pytorch.conv.gmmconv": "nn GMMConv",
    "nn.pytorch.conv.graphconv": "nn EdgeWeightNorm GraphConv",
    "nn.pytorch.conv.nnconv": "nn NNConv",
    "nn.pytorch.conv.relgraphconv": "nn RelGraphConv",
    "nn.pytorch.conv.sageconv": "nn SAGEConv",
    "nn.pytorch.conv.sgconv": "nn SGConv",
    "nn.pytorch.conv.tagconv": "nn TAGConv",
}


class FunctionModule(ModuleType):
    """A module that is called as the function of its name, as in ``dgl.batch(graphs)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def add_modules(package: str) -> None:
    """Make the modules importable. One that exists gets the names it lacks.

    Args:
        package: Name of this package.
    """
    for place, entries in MODULES.items():
        names = {}
        for entry in entries.split("; "):
            origin, *wanted = entry.split()
            source = importlib.import_module(
                origin if origin.startswith("torch.") else f"{package}.{origin}".rstrip(".")
            )
            for name in wanted:
                target, _, original = name.partition("=")
                names[target] = getattr(source, original or target)
        full_name = f"{package}.{place}"
        parent, _, last = full_name.rpartition(".")
        module = sys.modules.get(full_name)
        if module is None:
            kind = FunctionModule if last in names else ModuleType
            module = sys.modules[full_name] = kind(full_name, f"Names of ``dgl.{place}``.")
            if last not in names:  # else the parent has the function
                setattr(sys.modules[parent], last, module)
        for name, value in names.items():
            if not hasattr(module, name):
                setattr(module, name, value)
