# SPDX-License-Identifier: Apache-2.0
"""Modules under the names that DGL has for them: ``dgl.readout``, ``dgl.geometry`` and others.

Scripts import names from the modules in which DGL keeps them. Where this package keeps them
elsewhere, there is a module of DGL's name that holds the same objects and has no file.
"""

from __future__ import annotations

import fnmatch
import importlib
import sys
from types import ModuleType
from typing import Any

_ATTENTION_CONVS = "AGNNConv DotGatConv GATConv GATv2Conv"
_CONVS = (
    "APPNPConv ChebConv EdgeConv GINConv GINEConv GMMConv GatedGraphConv NNConv RelGraphConv "
    "SAGEConv SGConv TAGConv"
)

# DGL's module: where its names are here, and the names, or patterns of them (all, where none is
# named); of several origins, after semicolons.
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
    "propagate": "graphs._propagate",
    "random": "graphs._random choice seed",
    "readout": "graphs._readout",
    "subgraph": ". edge_subgraph edge_type_subgraph in_subgraph khop_in_subgraph "
    "khop_out_subgraph node_subgraph node_type_subgraph out_subgraph",
    "traversal": "graphs._orders",
    "udf": ". EdgeBatch NodeBatch",
    "partition": "transforms metis_partition metis_partition_assignment "
    "partition_graph_with_halo reorder_nodes",
    "function.message": "function copy_e copy_u u_add_v u_div_v u_dot_v u_mul_v u_sub_v u_add_e "
    "u_div_e u_dot_e u_mul_e u_sub_e",
    "function.reducer": "function max mean min sum",
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
    "ops.spmm": "ops copy_[ue]_m* copy_[ue]_sum u_???_e_*",
    "ops.sddmm": "ops copy_? gsddmm [uve]_???_[uve]",
    "ops.edge_softmax": "ops edge_softmax",
    "ops.segment": "ops segment_mm segment_reduce segment_softmax",
    "nn.functional": "nn edge_softmax",
    "nn.glob": "nn AvgPooling GlobalAttentionPooling MaxPooling Set2Set SortPooling SumPooling "
    "WeightAndSum",
    "nn.pytorch.glob": "nn.glob",
    "nn.pytorch.hetero": "nn HeteroEmbedding HeteroGraphConv HeteroLinear",
    "nn.pytorch.linear": "nn TypedLinear",
    "nn.pytorch.softmax": "nn edge_softmax",
    "nn.pytorch.conv": f"nn EdgeWeightNorm GraphConv {_ATTENTION_CONVS} {_CONVS}",
    "nn.pytorch.factory": "nn KNNGraph RadiusGraph SegmentedKNNGraph knn_graph "
    "radius_graph segmented_knn_graph",
    "nn.pytorch.link": "nn EdgePredictor TransE TransR",
    "nn.pytorch.utils": "nn Identity JumpingKnowledge LabelPropagation Sequential WeightBasis",
    "nn.pytorch.explain": "nn GNNExplainer",
    "nn.pytorch.conv.graphconv": "nn EdgeWeightNorm GraphConv",
}
for _name in _CONVS.split():
    MODULES[f"nn.pytorch.conv.{_name.lower()}"] = f"nn {_name}"
for _name in _ATTENTION_CONVS.split():
    MODULES[f"nn.pytorch.conv.{_name.lower()}"] = f"nn {_name} edge_softmax"


class FunctionModule(ModuleType):
    """A module that is called as the function of its name, as in ``dgl.batch(graphs)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def expanded(names: list[str], source: ModuleType) -> list[str]:
    """The names of an entry: patterns, and no name at all, stand for what a star import takes."""
    public = getattr(source, "__all__", None) or [n for n in vars(source) if not n.startswith("_")]
    return [n for name in names or ["*"] for n in fnmatch.filter(public, name) or [name]]


def add_modules(package: str) -> None:
    """Make the modules importable. One that exists gets the names it lacks."""
    for path, entries in MODULES.items():
        members = {}
        for entry in entries.split("; "):
            origin, *names = entry.split()
            source = importlib.import_module(
                origin if origin.startswith("torch.") else f"{package}.{origin}".rstrip(".")
            )
            for name in expanded(names, source):
                target, _, original = name.partition("=")
                members[target] = getattr(source, original or target)
        full_name = f"{package}.{path}"
        parent, _, last = full_name.rpartition(".")
        module = sys.modules.get(full_name)
        if module is None:
            kind = FunctionModule if last in members else ModuleType
            module = sys.modules[full_name] = kind(full_name, f"Names of ``dgl.{path}``.")
            if last not in members:  # else the parent has the function
                setattr(sys.modules[parent], last, module)
        for name, value in members.items():
            if not hasattr(module, name):
                setattr(module, name, value)
