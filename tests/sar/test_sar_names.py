# SPDX-License-Identifier: Apache-2.0
"""SAR's modules and names are there, each one object wherever it is named. And 2 gloo ranks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import graphshard
import graphshard.sar as sar
from graphshard.testing import run_ranks

# SAR's modules, and what its documents, examples and tests take from them.
PLACES = {
    "": "initialize_comms rank world_size nfs_ip_init comm_device DistributedBN1D construct_mfgs "
    "construct_full_graph convert_dist_graph GraphShardManager HeteroGraphShardManager "
    "load_dgl_partition_data suffix_key_lookup Config edge_softmax message_has_parameters "
    "DistributedBlock DistNeighborSampler DataLoader logging_setup logger RelGraphConv sync_params "
    "gather_grads patch_dgl patched_edge_softmax core comm config common_tuples "
    "construct_shard_manager data_loading distributed_bn",
    "comm": "initialize_comms is_initialized rank world_size backend comm_device nfs_ip_init "
    "dump_ip_address get_ip_address all_reduce all_to_all all_to_all_rounds "
    "all_to_all_gloo_support exchange_single_tensor exchange_tensors sync_params gather_grads",
    "common_tuples": "PartitionData",
    "config": "Config",
    "construct_shard_manager": "construct_mfgs construct_full_graph convert_dist_graph",
    "core": "GraphShard GraphShardManager HeteroGraphShardManager message_has_parameters "
    "DistributedBlock DistNeighborSampler DataLoader graphshard sampling sar_aggregation "
    "full_partition_block",
    "core.graphshard": "GraphShard GraphShardManager HeteroGraphShardManager",
    "core.full_partition_block": "DistributedBlock",
    "core.sampling": "DistNeighborSampler DataLoader",
    "core.sar_aggregation": "message_has_parameters",
    "data_loading": "load_dgl_partition_data load_dgl_partition_data_from_graph suffix_key_lookup",
    "distributed_bn": "DistributedBN1D mean_op var_op",
    "edge_softmax": "edge_softmax",
    "logging_setup": "logger logging_setup",
    "patch_dgl": "patch_dgl patched_edge_softmax RelGraphConv",
}


def test_names_are_where_sar_has_them() -> None:
    objects: dict[str, object] = {}
    for place, names in PLACES.items():
        module = importlib.import_module(f"graphshard.sar.{place}".rstrip("."))
        for name in names.split():
            assert objects.setdefault(name, getattr(module, name)) is getattr(module, name), name
    for name in ("edge_softmax", "logging_setup", "patch_dgl"):  # a module and a function of it
        assert callable(getattr(sar, name))


def test_one_class_serves_one_type_and_several() -> None:
    assert sar.HeteroGraphShardManager is sar.GraphShardManager is graphshard.GraphShardManager


def test_instead_names_modules_of_sar() -> None:
    assert set(sar.INSTEAD) <= set(PLACES)


def means(rank: int, world_size: int) -> tuple[torch.Tensor, ...]:
    from graphshard.sar.distributed_bn import mean_op, var_op

    x = rows()[:2] if rank == 0 else rows()[2:]
    x.requires_grad_()
    mean, squares = mean_op(x), var_op(x)
    ((mean * torch.tensor([1.0, 2.0])).sum() + squares.sum()).backward()
    assert x.grad is not None
    return mean.detach(), squares.detach(), x.grad


def rows() -> torch.Tensor:
    return torch.arange(10, dtype=torch.float64).view(5, 2)


def test_means_over_the_rows_of_all_ranks() -> None:
    first, second = run_ranks(means, 2)
    whole = rows()
    for mean, squares, _ in (first, second):
        torch.testing.assert_close(mean, whole.mean(0))
        torch.testing.assert_close(squares, (whole**2).mean(0))
    # Each rank's loss is the same sum, so gradients are those of two of them.
    expected = 2 * (torch.tensor([1.0, 2.0]) + 2 * whole) / 5
    torch.testing.assert_close(torch.cat([first[2], second[2]]), expected)


def test_the_file_with_the_address(tmp_path: Path) -> None:
    address = sar.comm.dump_ip_address(str(tmp_path / "ip"))
    assert sar.comm.get_ip_address(str(tmp_path / "ip")) == address


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="sar_op"):
        sar.core.sar_aggregation.sar_op  # noqa: B018
