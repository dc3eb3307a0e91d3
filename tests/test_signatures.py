# SPDX-License-Identifier: Apache-2.0
"""Arguments by position: booleans stand where those libraries have them whose scripts run here.

Against DGL's signatures, read from DGL, and SAR's, written down. No process.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphshard
from dgl_peer import dgl
from graphshard import sampling
from graphshard.dgl import dataloading
from graphshard.dgl._graph_methods import _METHODS as GIVEN
from graphshard.nn import DistributedBN1D

# SAR 0.1.0, https://github.com/IntelLabs/SAR; what comes by name alone is left out.
SAR = {
    "DataLoader": "full_graph_manager seed_nodes graph_sampler batch_size drop_last shuffle "
    "precompute_optimized_batches optimized_batches_cache num_workers batch_comm_overlap",
    "DistNeighborSampler": "fanouts prob replace copy_edata input_node_features "
    "output_node_features output_device use_hybrid_partitioning batch_comm_overlap",
    "DistributedBN1D": "n_feats eps affine distributed",
    "construct_mfgs": "partition_data seed_nodes n_layers keep_seed_nodes",
    "DistributedBlock.get_full_partition_graph": "self delete_shard_data",
    "GraphShardManager.get_full_partition_graph": "self delete_shard_data",
    "suffix_key_lookup": "feature_dict key expand_to_all type_list",
}
MODULES = {
    "graphshard": types.SimpleNamespace(**{**vars(dgl.distributed), **vars(dgl)}),
    "graphshard.graph": dgl,
    "graphshard.nn": dgl.nn.pytorch,
    "graphshard.dgl.nn": dgl.nn.pytorch,
    "graphshard.dgl": dgl,
    "graphshard.dgl.data": types.SimpleNamespace(
        **{
            **vars(dgl.dataloading),
            **vars(dgl.data.citation_graph),
            **vars(dgl.data),
        }
    ),
    "graphshard.dgl.data.utils": dgl.data.utils,
    "graphshard.dgl.dataloading": dgl.dataloading,
    "graphshard.dgl.dataloading.negative_sampler": dgl.dataloading.negative_sampler,
    "graphshard.sampling": types.SimpleNamespace(**{**vars(dgl.sampling), **vars(dgl.dataloading)}),
    "graphshard.servers": dgl.distributed,
}
#: Nobody else has them, or not with these arguments.
OURS_ALONE = {
    "graphshard.graph.Frame.to non_blocking",  # as torch.Tensor.to
    "graphshard.sampling.MiniBatch.to non_blocking",
    "graphshard.partition.load_partition_feats load_edges",
    "graphshard.dgl.data.RDFGraphDataset.__init__ insert_reverse",  # a base, as DGL's is not
    "graphshard.dgl.data.RDFGraphDataset.__init__ force_reload",
    "graphshard.dgl.data.RDFGraphDataset.__init__ verbose",
    "graphshard.servers.HostTables.__init__ is_shared",
    "graphshard.servers.ServedHost.__init__ may_attach",
    "graphshard.servers.SparseOptimizer.zero_grad set_to_none",  # as torch.optim's
    "graphshard.servers.TableInfo.__init__ persistent",
    "graphshard.graph.load_tensors return_dgl_ndarray",  # as dgl.data.utils.load_tensors
    "graphshard.dgl.graphs._random.choice replace",  # as dgl.random.choice
}


def names_in(module: types.ModuleType) -> list[str]:
    """The public names of a module; those of others' names are what the module has."""
    return getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]


def functions(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A function, or the public methods of a class."""
    if not inspect.isclass(value):
        yield name, value
        return
    for key, method in vars(value).items():
        is_given = key in GIVEN and method is GIVEN[key]  # a function of graphshard.dgl, checked so
        is_public = key == "__init__" or not key.startswith("_")
        if inspect.isfunction(method) and is_public and not is_given:
            yield f"{name}.{key}", method


def names_of(function: Any) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def booleans() -> Iterator[tuple[str, str, int, list[list[str]]]]:
    """Public name, parameter, its place, and the parameters of each library that has the name."""
    for module_name, peer_module in MODULES.items():
        module = importlib.import_module(module_name)
        for public in names_in(module):
            value = getattr(module, public)
            if not callable(value) or not getattr(value, "__module__", "").startswith("graphshard"):
                continue
            for name, function in functions(public, value):
                peers = []
                is_layer = hasattr(dgl.nn.pytorch, public)  # RelGraphConv, at SAR's place too
                found = dgl.nn.pytorch if is_layer else peer_module
                for part in name.split("."):
                    found = getattr(found, part, None)
                if inspect.isfunction(found):
                    peers.append(names_of(found))
                in_sar = SAR.get(name.removesuffix(".__init__"))
                if in_sar is not None:
                    of_sar = [*(["self"] if "__init__" in name else []), *in_sar.split()]
                    # DGL has a DataLoader too, but not at the places where SAR's is.
                    is_sars = module_name in ("graphshard", "graphshard.sampling")
                    peers = [of_sar] if is_sars else [*peers, of_sar]
                parameters = inspect.signature(function).parameters
                for place, parameter in enumerate(names_of(function)):
                    p = parameters[parameter]
                    if isinstance(p.default, bool) or str(p.annotation).startswith("bool"):
                        yield f"{module_name}.{name}", parameter, place, peers


def test_booleans_by_position_are_where_others_have_them() -> None:
    found = list(booleans())
    assert len(found) > 20
    for name, parameter, place, peers in found:
        if f"{name} {parameter}" in OURS_ALONE:
            continue
        what = f"{name}: {parameter} must go by name alone"
        assert peers, f"{what}, or be listed in OURS_ALONE"
        for names in peers:
            assert len(names) > place, f"{what}: it has no such argument elsewhere"
            assert names[place] == parameter, f"{what}: elsewhere {names[place]} is there"


#: Arguments of DGL 1.1.3 that the same name does not take here.
NOT_TAKEN = {
    "_dist_training": "for DGL's own servers",
    "msgs": "of batches that DGL makes for functions of users",
}
#: Names whose arguments are their own: what users make is made by functions, or DGL has two.
OWN_ARGUMENTS = {
    *("DGLGraph", "DGLHeteroGraph", "DGLBlock", "Graph", "EdgeBatch", "NodeBatch"),
    *("to_homogeneous", "to_heterogeneous"),  # whose first is called G
    "read_ip_config",
}


def shared_functions() -> Iterator[tuple[str, Any, Any]]:
    """Public functions and methods that DGL has, too: name, ours, DGL's."""
    for module_name, peer in MODULES.items():
        module = importlib.import_module(module_name)
        for public in names_in(module):
            value, theirs = getattr(module, public), getattr(peer, public, None)
            if not getattr(value, "__module__", "").startswith("graphshard") or theirs is None:
                continue
            if module_name != "graphshard.dgl.dataloading" and public == "DataLoader":
                continue  # SAR's
            if inspect.isclass(value) and inspect.isclass(theirs):
                for key, method in inspect.getmembers(value, inspect.isfunction):
                    other = inspect.getattr_static(theirs, key, None)
                    is_shared = inspect.isfunction(other) and not key.startswith("_")
                    if is_shared or (key == "__init__" and public not in OWN_ARGUMENTS):
                        yield f"{module_name}.{public}.{key}", method, other
            elif inspect.isfunction(theirs) and public not in OWN_ARGUMENTS:
                yield f"{module_name}.{public}", value, theirs


def test_arguments_that_dgl_takes_by_name_are_taken() -> None:
    compared = 0
    for name, ours, theirs in shared_functions():
        if not inspect.isfunction(theirs):
            continue
        of_ours = inspect.signature(ours).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in of_ours.values())
        of_theirs = list(inspect.signature(theirs).parameters.values())
        is_method = next(iter(of_ours), None) == "self"  # whose graph DGL calls g, or graph
        missing = [
            p.name
            for p in of_theirs[is_method:]
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and p.name not in {*of_ours, *NOT_TAKEN, "self"}
        ]
        compared += 1
        assert takes_all or not missing, f"{name} does not take {missing}, which DGL's does"
    assert compared > 250


def loaders() -> list[Any]:
    graph = graphshard.graph(([0, 1], [1, 0]))
    seeds = torch.arange(2)
    blocks = dataloading.NeighborSampler([1])
    return [
        *(
            pytest.param(
                lambda *a, kind=kind: kind(graph, seeds, blocks, "cpu", *a), id=kind.__name__
            )
            for kind in (
                dataloading.DataLoader,
                dataloading.NodeDataLoader,
                dataloading.EdgeDataLoader,
            )
        ),
    ]


@pytest.mark.parametrize("loader", loaders())
def test_loaders_take_booleans_by_name(loader: Callable[..., Any]) -> None:
    loader()
    for given in [(False,), (False, True)]:
        with pytest.raises(TypeError, match=r"by name alone.*\(got False(, True)? by position\)"):
            loader(*given)


def test_the_error_names_the_arguments() -> None:
    graph, sampler = graphshard.graph(([0, 1], [1, 0])), dataloading.NeighborSampler([1])
    text = (
        "LocalDataLoader takes use_ddp, ddp_seed, batch_size and what follows by name alone, "
        "because SAR, DGL and torch have them in different orders (got False, True by position); "
        "write use_ddp=..."
    )
    with pytest.raises(TypeError) as caught:
        dataloading.DataLoader(graph, torch.arange(2), sampler, "cpu", False, True)
    assert str(caught.value) == text


def test_the_loader_of_sar_has_its_order() -> None:
    graph, seeds = graphshard.graph(([0, 1, 2], [1, 2, 0])), torch.arange(3)
    sampler = sampling.DistNeighborSampler([1], None, False, False, {"x": torch.ones(3, 1)})
    assert not sampler.copy_edata
    loader = graphshard.DataLoader(graph, seeds, sampler, 2, True, False)
    assert (loader.drop_last, loader.shuffle, len(loader)) == (True, False, 1)
    loader = graphshard.DataLoader(graph, seeds, sampler, 2, False, True, True, "cache", 2, True)
    assert (loader.drop_last, loader.shuffle, len(loader)) == (False, True, 2)
    for wrong in [(1,), (False, "yes"), (False, False, 0)]:
        with pytest.raises(TypeError, match=r"must be True or False \(got (1|'yes'|0)\); by pos"):
            graphshard.DataLoader(graph, seeds, sampler, 2, *wrong)
    with pytest.raises(TypeError, match="copy_edata, True or False .got {'x'"):
        sampling.DistNeighborSampler([1], None, False, {"x": 1})


def test_batch_norm_has_the_order_of_sar() -> None:
    norm = DistributedBN1D(8, 1e-5, False)
    assert (norm.affine, norm.weight, norm.momentum, norm.distributed) == (False, None, 0.1, True)
    norm = DistributedBN1D(8, 1e-4, True, False)
    assert (norm.affine, norm.eps, norm.distributed) == (True, 1e-4, False)
    assert DistributedBN1D(8, distributed=None).distributed
    for order_of_torch in [(0.1,), (None,), (0.1, True), (True, 0.1)]:
        with pytest.raises(TypeError, match=r"write momentum=... and affine=..."):
            DistributedBN1D(8, 1e-5, *order_of_torch)
    with pytest.raises(TypeError, match="positional"):
        DistributedBN1D(8, 1e-5, True, True, 0.1)
