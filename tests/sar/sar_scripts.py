# SPDX-License-Identifier: Apache-2.0
"""Programs as users of SAR write them; the first two imports are all that was changed.

Each runs on every rank, and makes and leaves its own process group. What it computes is returned,
with the parameters that it began with, so that a test can compute the same on the whole graph.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard.dgl as dgl
import graphshard.function as fn
import graphshard.sar as sar
from graphshard.sar.config import Config

EPOCHS, HIDDEN = 3, 6


@contextlib.contextmanager
def started(
    rank: int, world_size: int, folder: str, port: int, device: str = "cpu"
) -> Iterator[Any]:
    """The beginning that the programs share, and the end that SAR's leave to the process."""
    torch.manual_seed(rank)  # models differ between ranks until they are synchronised
    master_ip_address = sar.nfs_ip_init(rank, f"{folder}/ip_file")
    comm_device = torch.device("cpu")
    sar.initialize_comms(
        rank, world_size, master_ip_address, "gloo", comm_device, master_port_number=port
    )
    try:
        yield torch.device(device)
    finally:
        sar.shutdown_comms()


def loaded(
    name: str, folder: str, rank: int, device: torch.device
) -> tuple[Any, dict[str, Tensor]]:
    partition_data = sar.load_dgl_partition_data(
        partition_json_file=f"{folder}/{name}/{name}.json", own_partition_idx=rank, device=device
    )
    found = {}
    for name in ("train", "val", "test"):
        mask = sar.suffix_key_lookup(partition_data.node_features, f"{name}_mask")
        found[name] = mask.nonzero(as_tuple=False).view(-1).to(device)
    found["labels"] = sar.suffix_key_lookup(partition_data.node_features, "labels").long()
    found["features"] = sar.suffix_key_lookup(partition_data.node_features, "features").to(device)
    return partition_data, found


def num_classes(labels: Tensor) -> int:
    num_labels = labels.max() + 1
    sar.comm.all_reduce(num_labels, dist.ReduceOp.MAX, move_to_comm_device=True)
    return int(num_labels.item())


def total(number: int) -> int:
    points = torch.LongTensor([number])
    sar.comm.all_reduce(points, op=dist.ReduceOp.SUM, move_to_comm_device=True)
    return int(points.item())


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def stepped(model: nn.Module, optimizer: Any, loss: Tensor) -> float:
    """One step, and the loss of all ranks."""
    optimizer.zero_grad()
    loss.backward()
    sar.gather_grads(model)
    optimizer.step()
    shared = torch.tensor([loss.item()], dtype=torch.float64)
    sar.comm.all_reduce(shared, op=dist.ReduceOp.SUM)
    return float(shared)


class GNNModel(nn.Module):
    """Layers of one kind, of the module that is given: this package's, or DGL's own."""

    def __init__(self, of: Any, kind: str, dims: list[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        for inputs, outputs in zip(dims, dims[1:], strict=False):
            if kind == "gat":
                self.convs.append(of.nn.GATConv(inputs, outputs, 2))
            elif kind == "gcn":
                self.convs.append(of.nn.GraphConv(inputs, outputs))
            else:
                self.convs.append(of.nn.SAGEConv(inputs, outputs, aggregator_type="mean"))

    def forward(self, blocks: Any, features: Tensor) -> Tensor:
        for idx, conv in enumerate(self.convs):
            Config.current_layer_index = idx
            features = conv(blocks[idx] if isinstance(blocks, list) else blocks, features)
            if features.ndim == 3:
                features = features.mean(1)
            if idx < len(self.convs) - 1:
                features = F.relu(features, inplace=True)
        return features


def basic(rank: int, world_size: int, folder: str, port: int) -> dict[str, Any]:
    with started(rank, world_size, folder, port) as device:
        partition_data, data = loaded("plain", folder, rank, device)
        full_graph_manager = sar.construct_full_graph(partition_data).to(device)
        features, labels = data["features"], data["labels"]
        model = GNNModel(dgl, "sage", [features.size(1), HIDDEN, num_classes(labels)]).double()
        sar.sync_params(model)
        first, points = parameters_of(model), total(data["train"].numel())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(EPOCHS):
            logits = model(full_graph_manager, features)
            loss = (
                F.cross_entropy(logits[data["train"]], labels[data["train"]], reduction="sum")
                / points
            )
            losses.append(stepped(model, optimizer, loss))
        results = []
        for name in ("train", "val", "test"):
            correct = (logits[data[name]].argmax(1) == labels[data[name]]).float().sum()
            results.extend([correct, data[name].numel()])
        accuracies = torch.FloatTensor(results)
        sar.comm.all_reduce(accuracies, op=dist.ReduceOp.SUM, move_to_comm_device=True)
        return {"first": first, "losses": losses, "accuracies": accuracies}


def advanced(rank: int, world_size: int, folder: str, port: int, kinds: list[str]) -> list[Any]:
    """Every mode, with the full graph and with message flow graphs."""
    found = []
    with started(rank, world_size, folder, port) as device:
        sar.patch_dgl()
        sar.logging_setup(logging.getLevelName("WARNING"), rank, world_size)
        Config.total_layers, Config.total_train_iter = 2, EPOCHS
        for kind in kinds:
            for mode in ("SAR", "SA", "one_shot_aggregation"):
                for mfgs in (False, True):
                    sar.Config.disable_sr = mode == "SA"
                    sar.Config.max_collective_size = 7 if mode == "SA" else 0
                    found.append(
                        (kind, mode, mfgs, _advanced(folder, rank, device, kind, mode, mfgs))
                    )
        sar.Config.disable_sr, sar.Config.max_collective_size = False, 0
    return found


def _advanced(
    folder: str, rank: int, device: torch.device, kind: str, mode: str, mfgs: bool
) -> dict[str, Any]:
    partition_data, data = loaded("plain", folder, rank, device)
    features, labels, n_layers = data["features"], data["labels"], 2
    first_id = partition_data.node_ranges[sar.comm.rank()][0]
    if mfgs:
        train_blocks = sar.construct_mfgs(partition_data, data["train"] + first_id, n_layers)
        everything = torch.cat([data[name] for name in ("train", "val", "test")])
        eval_blocks = sar.construct_mfgs(partition_data, everything + first_id, n_layers)
        if mode == "one_shot_aggregation":
            train_blocks = [block.get_full_partition_graph() for block in train_blocks]
            eval_blocks = [block.get_full_partition_graph() for block in eval_blocks]
        train_blocks = [block.to(device) for block in train_blocks]
        eval_blocks = [block.to(device) for block in eval_blocks]
    else:
        full_graph_manager = sar.construct_full_graph(partition_data)
        if mode == "one_shot_aggregation":
            full_graph_manager = full_graph_manager.get_full_partition_graph()
        assert isinstance(full_graph_manager, sar.GraphShardManager | sar.DistributedBlock)
        full_graph_manager = full_graph_manager.to(device)
        train_blocks = eval_blocks = [full_graph_manager] * n_layers
    del partition_data
    model = GNNModel(dgl, kind, [features.size(1), HIDDEN, num_classes(labels)]).double()
    sar.sync_params(model)
    first, points = parameters_of(model), total(data["train"].numel())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for train_iter_idx in range(EPOCHS):
        Config.train_iter = train_iter_idx
        inputs = features[train_blocks[0].input_nodes] if mfgs else features
        logits = model(train_blocks, inputs)
        wanted = logits if mfgs else logits[data["train"]]
        loss = F.cross_entropy(wanted, labels[data["train"]], reduction="sum") / points
        losses.append(stepped(model, optimizer, loss))
    model.eval()
    with torch.no_grad():
        inputs = features[eval_blocks[0].input_nodes] if mfgs else features
        logits = model(eval_blocks, inputs)
    correct, start = [], 0
    for name in ("train", "val", "test"):
        active = logits[start : start + data[name].numel()] if mfgs else logits[data[name]]
        start += data[name].numel()
        correct.append((active.argmax(1) == labels[data[name]]).float().sum().item())
    counted = torch.FloatTensor(correct)
    sar.comm.all_reduce(counted, op=dist.ReduceOp.SUM, move_to_comm_device=True)
    return {"first": first, "losses": losses, "correct": counted}


class RelGraphConvOfSar(dgl.nn.RelGraphConv):
    """As SAR's documents make it, to name the parameters of the messages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @sar.message_has_parameters(lambda self: tuple(self.linear_r.parameters()))
    def message(self, edges: Any) -> dict[str, Tensor]:
        return super().message(edges)


class RelationalModel(nn.Module):
    def __init__(self, layer: Any, dims: list[int], n_rels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            layer(inputs, outputs, n_rels) for inputs, outputs in zip(dims, dims[1:], strict=False)
        )

    def forward(self, graph: Any, features: Tensor, etypes: Tensor) -> Tensor:
        for idx, conv in enumerate(self.convs):
            features = conv(graph, features, etypes)
            if idx < len(self.convs) - 1:
                features = F.relu(features, inplace=True)
        return features


def heterogeneous(
    rank: int, world_size: int, folder: str, port: int, named: bool
) -> dict[str, Any]:
    """All types in one tensor of features, and edge types as numbers, by shards."""
    with started(rank, world_size, folder, port) as device:
        sar.patch_dgl()
        partition_data = sar.load_dgl_partition_data(f"{folder}/typed/typed.json", rank, device)
        names = partition_data.node_type_names

        def lookup(key: str) -> Tensor:
            return sar.suffix_key_lookup(
                partition_data.node_features, key, expand_to_all=True, type_list=names
            )

        train = lookup("train_mask").nonzero(as_tuple=False).view(-1)
        labels, features = lookup("labels").long(), lookup("features")
        own = partition_data.node_ranges[rank]
        assert own[1] - own[0] == len(features) == len(partition_data.node_features[dgl.NTYPE])
        n_rels = len(partition_data.edge_type_names)
        full_graph_manager = sar.construct_full_graph(partition_data).to(device)
        etypes_l = []
        for graph_shard in full_graph_manager.graph_shards:
            etypes_l.append(graph_shard.graph.edata[dgl.ETYPE])
            del graph_shard.graph.edata[dgl.ETYPE]
        etypes = torch.cat(etypes_l)
        dims = [features.size(1), HIDDEN, num_classes(labels)]
        layer = RelGraphConvOfSar if named else sar.RelGraphConv
        model = RelationalModel(layer, dims, n_rels).double()
        sar.sync_params(model)
        first, points = parameters_of(model), total(train.numel())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(EPOCHS):
            logits = model(full_graph_manager, features, etypes)
            loss = F.cross_entropy(logits[train], labels[train], reduction="sum") / points
            losses.append(stepped(model, optimizer, loss))
        return {"first": first, "losses": losses}


class RelationLayer(nn.Module):
    """A matrix per relation and, for each node type, one for the node itself."""

    def __init__(self, of: Any, width: int, out: int, ntypes: list[str], rels: list[str]) -> None:
        super().__init__()
        self.rels = rels
        convs = {
            rel: of.nn.GraphConv(width, out, norm="right", weight=False, bias=False) for rel in rels
        }
        self.conv = of.nn.HeteroGraphConv(convs)
        self.weight = nn.ModuleDict({rel: nn.Linear(width, out, bias=False) for rel in rels})
        self.loop_weights = nn.ModuleDict({ntype: nn.Linear(width, out) for ntype in ntypes})

    def forward(self, g: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with g.local_scope():
            weights = {rel: {"weight": self.weight[rel].weight.T} for rel in self.rels}
            own = {k: v[: g.number_of_dst_nodes(k)] for k, v in inputs.items()}
            sums = self.conv(g, inputs, mod_kwargs=weights)
        return {t: h + self.loop_weights[t](own[t]) for t, h in sums.items()}


class TypedModel(nn.Module):
    def __init__(self, of: Any, g: Any, width: int, classes: int) -> None:
        super().__init__()
        rels = sorted(set(g.etypes))
        ntypes = sorted(set(g.ntypes))
        self.layers = nn.ModuleList(
            [
                RelationLayer(of, width, width, ntypes, rels),
                RelationLayer(of, width, classes, ntypes, rels),
            ]
        )

    def forward(self, graph: Any, h: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = graph if isinstance(graph, list) else [graph] * 2
        h = {k: F.relu(v) for k, v in self.layers[0](blocks[0], h).items()}
        return self.layers[1](blocks[1], h)  # type: ignore[no-any-return]


def typed(rank: int, world_size: int, folder: str, port: int, mfgs: bool) -> dict[str, Any]:
    """Types kept apart, with a table of embeddings for the type that has no features."""
    with started(rank, world_size, folder, port) as device:
        partition_data = sar.load_dgl_partition_data(f"{folder}/typed/typed.json", rank, device)
        node_features, names = partition_data.node_features, partition_data.node_type_names
        train_mask = sar.suffix_key_lookup(node_features, "train_mask", type_list=names).bool()
        labels = sar.suffix_key_lookup(node_features, "labels", type_list=names).long()
        features = sar.suffix_key_lookup(node_features, "features", type_list=names)
        expanded = sar.suffix_key_lookup(
            node_features, "train_mask", expand_to_all=True, type_list=names
        )
        seeds = expanded.nonzero().view(-1) + partition_data.node_ranges[sar.comm.rank()][0]
        if mfgs:
            graph: Any = sar.construct_mfgs(partition_data, seeds, 2)
            whole = graph[0]
            for block in graph:
                assert block.num_nodes() == sum(block.num_nodes(t) for t in block.ntypes)
        else:
            graph = whole = sar.construct_full_graph(partition_data).to(device)
        book = partition_data.partition_book
        first_author = int(book.partid2nids(rank, "author")[0])
        table = dgl.nn.HeteroEmbedding({"author": book.num_nodes("author")}, features.size(1))
        model = TypedModel(dgl, whole, features.size(1), num_classes(labels)).double()
        table.double().reset_parameters()
        sar.sync_params(model)
        sar.sync_params(table)
        both = nn.ModuleDict({"model": model, "table": table})
        first, points = parameters_of(both), total(int(train_mask.sum()))
        optimizer = torch.optim.Adam(both.parameters(), lr=0.01)
        losses = []
        for _ in range(EPOCHS):
            h = table({"author": whole.srcnodes("author") + first_author})
            h["paper"] = features[whole.srcnodes("paper")]
            logits = model(graph, h)["paper"].log_softmax(dim=-1)
            logits = logits if mfgs else logits[train_mask]
            loss = F.nll_loss(logits, labels[train_mask], reduction="sum") / points
            losses.append(stepped(both, optimizer, loss))
        authors = sar.suffix_key_lookup(node_features, "orig_id", ntype="author")
        return {"first": first, "losses": losses, "authors": authors}


def sampling(rank: int, world_size: int, folder: str, port: int) -> dict[str, Any]:
    """Batches that take all neighbours, then the full graph: the same outputs."""
    with started(rank, world_size, folder, port) as device:
        partition_data, data = loaded("plain", folder, rank, torch.device("cpu"))
        features, labels = data["features"], data["labels"]
        full_graph_manager = sar.construct_full_graph(partition_data)
        node_ranges = partition_data.node_ranges
        del partition_data
        weight = full_graph_manager.in_degrees()[:0].new_ones(full_graph_manager.num_edges())
        full_graph_manager.edata["weight"] = weight * (rank + 1)
        model = GNNModel(dgl, "sage", [features.size(1), HIDDEN, num_classes(labels)]).double()
        sar.sync_params(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        neighbor_sampler = sar.core.sampling.DistNeighborSampler(
            [-1, -1],
            input_node_features={"features": features},
            output_node_features={"labels": labels},
            output_device=device,
            use_hybrid_partitioning=False,
            batch_comm_overlap=True,
        )
        train_nodes = data["train"] + node_ranges[sar.rank()][0]
        dataloader = sar.core.sampling.DataLoader(
            full_graph_manager,
            train_nodes,
            neighbor_sampler,
            4,
            shuffle=True,
            precompute_optimized_batches=True,
            optimized_batches_cache=None,
            num_workers=0,
            batch_comm_overlap=True,
        )
        assert full_graph_manager.sampling_graph.num_edges() == full_graph_manager.num_edges()
        losses, seen = [], []
        for _ in range(EPOCHS):
            for blocks in dataloader:
                blocks = [block.to(device) for block in blocks]
                assert "weight" in blocks[0].edata
                logits = model(blocks, blocks[0].srcdata["features"])
                block_labels = blocks[-1].dstdata["labels"]
                seeds = blocks[-1].dstdata[dgl.NID] - node_ranges[rank][0]
                assert torch.equal(block_labels, labels[seeds])
                seen.append(seeds)
                loss = F.cross_entropy(logits, block_labels, reduction="sum")
                losses.append(stepped(model, optimizer, loss))
        model.eval()
        with torch.no_grad():
            full = model([full_graph_manager] * 2, features)
            apart = [
                (model(blocks, blocks[0].srcdata["features"]), blocks[-1].dstdata[dgl.NID])
                for blocks in dataloader
            ]
        for logits, nodes in apart:
            torch.testing.assert_close(logits, full[nodes - node_ranges[rank][0]])
        epochs = torch.cat(seen).view(EPOCHS, -1)
        assert all(torch.equal(e.sort().values, data["train"]) for e in epochs)
        return {"losses": losses}


class APPNP(nn.Module):
    def __init__(self, of: Any, g: Any, dims: list[int]) -> None:
        super().__init__()
        self.g = g
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:], strict=False))
        self.propagate = of.nn.APPNPConv(4, 0.1, 0.0)

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            h = F.relu(layer(h))
        return self.propagate(self.g, self.layers[-1](h))  # type: ignore[no-any-return]


def appnp(rank: int, world_size: int, folder: str, port: int) -> dict[str, Any]:
    with started(rank, world_size, folder, port) as device:
        partition_data, data = loaded("plain", folder, rank, device)
        full_graph_manager = sar.construct_full_graph(partition_data).to(device)
        features, labels = data["features"], data["labels"]
        dims = [features.size(1), HIDDEN, num_classes(labels)]
        model = APPNP(dgl, full_graph_manager, dims).double()
        sar.sync_params(model)
        first, points = parameters_of(model), total(data["train"].numel())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        losses = []
        for _ in range(EPOCHS):
            logits = model(features)[data["train"]]
            loss = F.cross_entropy(logits, labels[data["train"]], reduction="sum") / points
            losses.append(stepped(model, optimizer, loss))
        return {"first": first, "losses": losses}


def averaged(of: Any, g: Any, features: Tensor, hops: int) -> list[Tensor]:
    """Features of SIGN: those of the node, then weighted means over 1, 2, ... hops."""
    fn = of.function
    with torch.no_grad():
        with g.local_scope():
            g.ndata["in_deg"] = g.in_degrees().to(features.dtype).pow(-0.5)
            g.ndata["out_deg"] = g.out_degrees().to(features.dtype).pow(-0.5)
            g.apply_edges(fn.u_mul_v("out_deg", "in_deg", "weight"))
            g.update_all(fn.copy_e("weight", "msg"), fn.sum("msg", "norm"))
            g.apply_edges(fn.e_div_v("weight", "norm", "weight"))
            weight = g.edata["weight"]
        g.edata["weight"] = weight
        g.ndata["feat_0"] = features
        for hop in range(1, hops + 1):
            g.update_all(
                fn.u_mul_e(f"feat_{hop - 1}", "weight", "msg"), fn.sum("msg", f"feat_{hop}")
            )
        return [g.ndata.pop(f"feat_{hop}") for hop in range(hops + 1)]


def sign(rank: int, world_size: int, folder: str, port: int) -> dict[str, Any]:
    with started(rank, world_size, folder, port) as device:
        partition_data, data = loaded("plain", folder, rank, device)
        features, labels = data["features"], data["labels"]
        g = sar.construct_full_graph(partition_data).to(device)
        g.ndata["feat"], g.ndata["label"] = features, labels
        feats = averaged(dgl, g, g.ndata["feat"], 2)
        classes = num_classes(g.ndata["label"])
        model: nn.Module = nn.Linear(features.size(1) * 3, classes).double()
        model = nn.parallel.DistributedDataParallel(model)
        sar.sync_params(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(EPOCHS):
            with model.join():
                out = model(torch.cat([x[data["train"]] for x in feats], dim=-1))
                loss = nn.CrossEntropyLoss()(out, labels[data["train"]])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {"feats": feats, "nodes": g.original_ids["_N"], "params": parameters_of(model)}


class LabelPropagation(nn.Module):
    def __init__(self, of: Any, num_layers: int, alpha: float) -> None:
        super().__init__()
        self.fn, self.num_layers, self.alpha = of.function, num_layers, alpha

    @torch.no_grad()
    def forward(self, g: Any, labels: Tensor) -> Tensor:
        with g.local_scope():
            y, last = labels, (1 - self.alpha) * labels
            norm = g.in_degrees().to(y.dtype).clamp(min=1).pow(-0.5).unsqueeze(1)
            for _ in range(self.num_layers):
                g.srcdata["h"] = norm * y
                g.update_all(self.fn.copy_u("h", "m"), self.fn.sum("m", "h"))
                y = (last + self.alpha * g.dstdata["h"] * norm).clamp_(-1.0, 1.0)
            return y


def smoothed(of: Any, g: Any, y_soft: Tensor, labels: Tensor, train: Tensor) -> Tensor:
    """Correct and smooth, with a fixed scale."""
    y_true = F.one_hot(labels[train], y_soft.size(-1)).to(y_soft.dtype)
    error = torch.zeros_like(y_soft)
    error[train] = y_true - y_soft[train]
    y_soft = y_soft + 2.0 * LabelPropagation(of, 5, 0.9)(g, error)
    y_soft[train] = y_true
    return LabelPropagation(of, 5, 0.7)(g, y_soft)  # type: ignore[no-any-return]


def normalized(features: Tensor, world_size: int) -> Tensor:
    means = torch.stack(sar.comm.exchange_tensors([features.mean(0)] * world_size))
    sizes = torch.stack(sar.comm.exchange_tensors([torch.tensor([features.shape[0]])] * world_size))
    mean = (means * sizes).sum(0) / sizes.sum()
    squares = sar.comm.exchange_tensors([(features - mean).pow(2).sum(0)] * world_size)
    return (features - mean) / torch.sqrt(torch.stack(squares).sum(0) / sizes.sum())


def correct_and_smooth(rank: int, world_size: int, folder: str, port: int) -> dict[str, Any]:
    with started(rank, world_size, folder, port) as device:
        partition_data, data = loaded("plain", folder, rank, device)
        full_graph_manager = sar.construct_full_graph(partition_data).to(device)
        features = normalized(data["features"], world_size)
        labels = data["labels"]
        classes = num_classes(labels)
        model = nn.Sequential(nn.Linear(features.size(1), classes), nn.LogSoftmax(-1)).double()
        sar.sync_params(model)
        points = total(data["train"].numel())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(EPOCHS):
            logits = model(features)[data["train"]]
            loss = F.nll_loss(logits, labels[data["train"]], reduction="sum") / points
            stepped(model, optimizer, loss)
        best_model = copy.deepcopy(model).eval()
        with torch.no_grad():
            y_soft = best_model(features).exp()
            out = smoothed(dgl, full_graph_manager, y_soft, labels, data["train"])
        return {
            "nodes": full_graph_manager.original_ids["_N"],
            "features": features,
            "y_soft": y_soft,
            "out": out,
        }


def partition_graph(folder: str, name: str, graph: Any, num_parts: int) -> None:
    """Of a graph as a data set gives it, what the programs above load."""
    graph = dgl.remove_self_loop(graph)
    graph = dgl.to_bidirected(graph, copy_ndata=True)
    graph = dgl.add_self_loop(graph)
    masks = [torch.BoolTensor(graph.number_of_nodes()).fill_(False) for _ in range(3)]
    for third, mask in enumerate(masks):
        mask[torch.arange(third, graph.number_of_nodes(), 3)] = True
    features, labels = graph.ndata["feat"], graph.ndata["label"].view(-1)
    graph.ndata.clear()
    names = ["train_mask", "val_mask", "test_mask", "labels", "features"]
    for key, value in zip(names, [*masks, labels, features], strict=True):
        graph.ndata[key] = value
    dgl.distributed.partition_graph(
        graph,
        name,
        num_parts,
        f"{folder}/{name}",
        num_hops=1,
        balance_ntypes=graph.ndata["train_mask"],
        balance_edges=True,
    )


__all__ = ["fn"]
