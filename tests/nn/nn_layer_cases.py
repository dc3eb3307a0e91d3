# SPDX-License-Identifier: Apache-2.0
"""One list of all layers and their options, for every test that asks something of each of them.

A case builds its layer from any namespace that has DGL's constructors, so the same list serves the
comparison with DGL; and it derives per-edge inputs from *original* edge ids, so that they are the
same for any partition, order or number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

import graphshard.dgl.nn
from graphshard._base.typing import CanonicalEType

IN_FEATS = 6
NUM_RELS = 3

Kind: TypeAlias = Literal["plain", "typed"]
EdgeInputs: TypeAlias = Callable[[Tensor, torch.dtype], dict[str, Tensor]]


def no_inputs(eids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {}


def edge_weight(eids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Positive weights in [0.5, 1.5), as scattered as random ones."""
    return {"edge_weight": (0.5 + (eids.double() * 0.6180339887498949) % 1.0).to(dtype)}


def etypes(eids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"etypes": (eids.long() * 7 + 1) % NUM_RELS}


def etypes_and_norm(eids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    norm = edge_weight(eids, dtype)["edge_weight"].unsqueeze(-1)
    return {**etypes(eids, dtype), "norm": norm}


@dataclass(frozen=True)
class LayerCase:
    """A layer with some options.

    Attributes:
        name: Unique, for test ids.
        build: ``build(namespace, canonical_etypes)`` constructs the layer.
        kind: ``plain``: called with one relation and one tensor (or a pair). ``typed``: called
            with a typed graph and a dictionary of tensors.
        edge_inputs: Keyword arguments of ``forward`` from the original ids of the edges.
        oneshot_only: On a sharded graph, needs all in-edges at once.
        pair: Accepts (source, destination) features.
        block: Accepts a bipartite block.
        attention: Accepts ``get_attention=True``.
    """

    name: str
    build: Callable[[Any, Sequence[CanonicalEType]], nn.Module]
    kind: Kind = "plain"
    edge_inputs: EdgeInputs = no_inputs
    oneshot_only: bool = False
    pair: bool = True
    block: bool = True
    attention: bool = False

    def make(
        self, canonical_etypes: Sequence[CanonicalEType] = (), namespace: Any = graphshard.dgl.nn
    ) -> nn.Module:
        """The layer, its parameters drawn from torch's default generator."""
        layer = self.build(namespace, canonical_etypes)
        allow_zero_in_degree(layer)
        return layer

    def keywords(
        self,
        eids: Tensor | Mapping[CanonicalEType, Tensor],
        dtype: torch.dtype = torch.float64,
    ) -> dict[str, Any]:
        """Keyword arguments of ``forward``.

        Args:
            eids: Original ids of the local edges in local order; per relation for ``typed``.
            dtype: Of what is real.
        """
        if isinstance(eids, Tensor):
            return dict(self.edge_inputs(eids, dtype))
        per_relation = {relation[1]: self.edge_inputs(ids, dtype) for relation, ids in eids.items()}
        return {"mod_kwargs": per_relation} if any(per_relation.values()) else {}


def allow_zero_in_degree(layer: nn.Module) -> None:
    """Set the flag on every layer inside, DGL's DotGatConv (which has no setter) included."""
    for module in layer.modules():
        if hasattr(module, "_allow_zero_in_degree"):
            module._allow_zero_in_degree = True


def mlp(namespace: Any, out_feats: int) -> nn.Module:
    return nn.Sequential(nn.Linear(IN_FEATS, 8), nn.Tanh(), nn.Linear(8, out_feats))


def plain(
    name: str, layer: str, *args: Any, more: Mapping[str, Any] | None = None, **options: Any
) -> LayerCase:
    return LayerCase(name, lambda lib, _: getattr(lib, layer)(*args, **options), **(more or {}))


def sage_cases() -> list[LayerCase]:
    cases = []
    for aggregator in ("mean", "gcn", "pool", "lstm"):
        for out in (3, 9):
            more = {"oneshot_only": aggregator == "lstm"}
            name = f"sage-{aggregator}-{out}"
            args = (IN_FEATS, out, aggregator)
            cases.append(plain(name, "SAGEConv", *args, more=more))
            more = {**more, "edge_inputs": edge_weight}
            cases.append(plain(f"{name}-weighted", "SAGEConv", *args, more=more, bias=False))
    functions = {"activation": torch.tanh, "norm": torch.nn.functional.normalize}
    cases.append(plain("sage-functions", "SAGEConv", IN_FEATS, 4, "mean", **functions))
    return cases


def graph_conv_cases() -> list[LayerCase]:
    cases = []
    for norm in ("none", "both", "right", "left"):
        for out in (3, 9):
            name, args = f"gcn-{norm}-{out}", (IN_FEATS, out)
            cases.append(plain(name, "GraphConv", *args, norm=norm))
            more = {"edge_inputs": edge_weight}
            cases.append(
                plain(f"{name}-weighted", "GraphConv", *args, more=more, norm=norm, bias=False)
            )
    options: dict[str, Any] = {"weight": False, "bias": False, "activation": torch.tanh}
    cases.append(plain("gcn-no-weight", "GraphConv", IN_FEATS, IN_FEATS, **options))
    return cases


def attention_cases() -> list[LayerCase]:
    more = {"attention": True}
    weighted = {**more, "edge_inputs": edge_weight}
    gat = (IN_FEATS, 3, 2)
    return [
        plain("gat", "GATConv", *gat, more=more),
        plain("gat-weighted", "GATConv", *gat, more=weighted, negative_slope=0.1),
        plain("gat-residual-same", "GATConv", *gat, more=more, residual=True),
        plain("gat-residual", "GATConv", IN_FEATS, 4, 2, more=more, residual=True),
        plain("gat-no-bias", "GATConv", *gat, more=more, bias=False, activation=torch.tanh),
        plain("gatv2", "GATv2Conv", *gat, more=more),
        plain("gatv2-shared", "GATv2Conv", *gat, more={**more, "pair": False}, share_weights=True),
        plain("gatv2-residual-same", "GATv2Conv", *gat, more=more, residual=True),
        plain("gatv2-residual", "GATv2Conv", IN_FEATS, 4, 2, more=more, residual=True),
        plain("gatv2-no-bias", "GATv2Conv", *gat, more=more, bias=False, activation=torch.tanh),
        plain("dotgat", "DotGatConv", *gat, more={**more, "pair": False}),
        plain("agnn", "AGNNConv"),
        plain("agnn-fixed", "AGNNConv", init_beta=0.7, learn_beta=False),
    ]


def gin_cases() -> list[LayerCase]:
    cases = []
    for aggregator in ("sum", "max", "mean"):
        cases.append(
            LayerCase(
                f"gin-{aggregator}",
                lambda lib, _, a=aggregator: lib.GINConv(mlp(lib, 4), a, learn_eps=True),
            )
        )
        more = {"edge_inputs": edge_weight}
        options: dict[str, Any] = {"init_eps": 0.3, "activation": torch.tanh}
        cases.append(
            plain(f"gin-{aggregator}-weighted", "GINConv", None, aggregator, more=more, **options)
        )
    return cases


def propagation_cases() -> list[LayerCase]:
    more = {"pair": False, "block": False}
    weighted = {**more, "edge_inputs": edge_weight}
    return [
        plain("appnp", "APPNPConv", 3, 0.2, more=more),
        plain("appnp-weighted", "APPNPConv", 2, 0.5, more=weighted),
        plain("sgc", "SGConv", IN_FEATS, 3, more=more),
        plain("sgc-3", "SGConv", IN_FEATS, 9, 3, more=more, norm=torch.tanh, bias=False),
        plain("sgc-weighted", "SGConv", IN_FEATS, 3, 2, more=weighted),
    ]


def relational_cases() -> list[LayerCase]:
    cases = []
    variants: dict[str, dict[str, Any]] = {
        "full": {},
        "basis": {"regularizer": "basis", "num_bases": 2},
        "basis-many": {"regularizer": "basis", "num_bases": 10},
        "basis-default": {"regularizer": "basis"},
        "bdd": {"regularizer": "bdd", "num_bases": 3},
    }
    for variant, options in variants.items():
        for inputs in (etypes, etypes_and_norm):
            more = {"edge_inputs": inputs, "pair": False}
            suffix = "-norm" if inputs is etypes_and_norm else ""
            args = (IN_FEATS, 9, NUM_RELS)
            cases.append(
                plain(f"rgcn-{variant}{suffix}", "RelGraphConv", *args, more=more, **options)
            )
    more = {"edge_inputs": etypes_and_norm, "pair": False}
    options = {"self_loop": False, "bias": False, "layer_norm": True, "activation": torch.tanh}
    cases.append(plain("rgcn-options", "RelGraphConv", IN_FEATS, 3, NUM_RELS, more=more, **options))
    return cases


def typed_cases() -> list[LayerCase]:
    def hetero(layer: Callable[[Any], nn.Module], aggregate: Any) -> Callable[..., nn.Module]:
        return lambda lib, relations: lib.HeteroGraphConv(
            {relation[1]: layer(lib) for relation in relations}, aggregate
        )

    layers: dict[str, Callable[[Any], nn.Module]] = {
        "gcn": lambda lib: lib.GraphConv(IN_FEATS, 3, norm="right"),
        "sage": lambda lib: lib.SAGEConv(IN_FEATS, 9, "mean"),
        "gat": lambda lib: lib.GATConv(IN_FEATS, 3, 2),
        "gatv2": lambda lib: lib.GATv2Conv((IN_FEATS, IN_FEATS), 3, 2),
    }
    cases = [
        LayerCase(f"hetero-{name}-{aggregate}", hetero(layer, aggregate), kind="typed")
        for name, layer in layers.items()
        for aggregate in ("sum", "max", "min", "mean", "stack")
        if name == "sage" or aggregate == "sum"
    ]
    for name in ("gcn", "sage", "gat"):
        build = hetero(layers[name], "mean")
        cases.append(LayerCase(f"hetero-{name}-weighted", build, "typed", edge_weight))
    return cases


def nn_layer_cases(kind: Kind | None = None) -> list[LayerCase]:
    """Every layer with every option that changes what is computed (dropout excepted).

    Args:
        kind: Only the cases of this kind.
    """
    cases = [
        *sage_cases(),
        *graph_conv_cases(),
        *attention_cases(),
        *gin_cases(),
        *propagation_cases(),
        *relational_cases(),
        *typed_cases(),
    ]
    return [case for case in cases if kind is None or case.kind == kind]
