# SPDX-License-Identifier: Apache-2.0
"""DGL, and the same little graphs in DGL and in graphshard."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgl_peer import dgl, dgl_nn
from graphshard._base.typing import CanonicalEType
from graphshard.graph import create_block, graph

__all__ = ["BLOCKS", "GRAPHS", "HETERO", "Edges", "compare", "dgl", "dgl_nn"]


@dataclass(frozen=True)
class Edges:
    """A graph of one relation, as lists."""

    src: tuple[int, ...]
    dst: tuple[int, ...]
    num_src: int
    num_dst: int
    idtype: torch.dtype = torch.int64

    def ends(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.src, dtype=self.idtype), torch.tensor(self.dst, dtype=self.idtype)

    def eids(self) -> Tensor:
        return torch.arange(len(self.src))

    def graphs(self) -> tuple[Any, Any]:
        """(ours, DGL's)."""
        ours = graph(self.ends(), num_nodes=self.num_src)
        return ours, dgl.graph(self.ends(), num_nodes=self.num_src)

    def blocks(self) -> tuple[Any, Any]:
        """(ours, DGL's)."""
        sizes = {"num_src_nodes": self.num_src, "num_dst_nodes": self.num_dst}
        ours = create_block(self.ends(), **sizes)
        return ours, dgl.create_block(self.ends(), **sizes)


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int) -> tuple[list[int], ...]:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=generator).tolist()
    dst = torch.randint(num_dst, (num_edges,), generator=generator).tolist()
    return src, dst


def _graphs() -> dict[str, Edges]:
    src, dst = random_edges(8, 8, 20, seed=1)
    # every node has an in-edge; self loops and parallel edges on top
    full_src, full_dst = (*src, *range(8), 3, 3), (*dst, *range(1, 8), 0, 3, 3)
    return {
        "full": Edges(full_src, full_dst, 8, 8),
        "int32": Edges(full_src, full_dst, 8, 8, torch.int32),
        "isolated": Edges((0, 1, 1, 2, 2, 2), (1, 0, 0, 2, 2, 4), 6, 6),
        "one": Edges((1,), (0,), 2, 2),
        "empty": Edges((), (), 3, 3),
    }


def _blocks() -> dict[str, Edges]:
    src, dst = random_edges(9, 4, 20, seed=2)
    return {
        "full": Edges((*src, 0, 1, 2, 3), (*dst, 0, 1, 2, 3), 9, 4),
        "isolated": Edges((5, 6, 6, 6), (1, 1, 1, 3), 8, 5),
        "empty": Edges((), (), 5, 2),
    }


GRAPHS = _graphs()
BLOCKS = _blocks()

HETERO: dict[CanonicalEType, Edges] = {
    ("user", "knows", "user"): Edges((0, 1, 2, 2, 4, 4), (1, 0, 2, 3, 3, 3), 5, 5),
    ("user", "plays", "game"): Edges((0, 0, 3, 4), (0, 1, 1, 1), 5, 3),
    ("shop", "sells", "game"): Edges((1, 1, 0), (0, 0, 2), 2, 3),
    ("game", "never", "user"): Edges((), (), 3, 5),
}
HETERO_NODES = {"user": 5, "game": 3, "shop": 2}


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    if dtype == torch.float64:
        return {"rtol": 1e-10, "atol": 1e-11}
    return {"rtol": 1e-4, "atol": 1e-5}


def flatten(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    return [tensor for value in values for tensor in flatten(value)]


def scalar(outputs: list[Tensor]) -> Tensor:
    """A weighted sum in which no two numbers weigh the same."""
    total = outputs[0].new_zeros(())
    for output in outputs:
        weights = torch.cos(torch.arange(output.numel(), dtype=output.dtype) * 1.7 + 0.3)
        total = total + (output * weights.reshape(output.shape)).sum()
    return total


def assert_close(ours: Any, theirs: Any, what: str) -> None:
    assert (ours is None) == (theirs is None), f"{what}: {ours} against {theirs}"
    if ours is not None:
        torch.testing.assert_close(
            ours, theirs, **tolerances(theirs.dtype), msg=lambda text: f"{what}: {text}"
        )


def compare(ours: Any, theirs: Any, graphs: tuple[Any, Any], inputs: Any, keywords: Any) -> None:
    """Same output; same gradients of inputs, of real edge inputs and of parameters.

    Args:
        ours: Our layer; it receives the parameters of ``theirs``.
        theirs: DGL's layer.
        graphs: (ours, DGL's).
        inputs: Tensor, pair, or dictionary (or pair of those) of node features.
        keywords: Keyword arguments of ``forward``.
    """
    ours.load_state_dict(theirs.state_dict())
    results = []
    for layer, its_graph in zip((ours, theirs), graphs, strict=True):
        leaves: list[Tensor] = []

        def leaf(value: Any, leaves: list[Tensor] = leaves) -> Any:
            if isinstance(value, Tensor):
                if value.is_floating_point():
                    value = value.detach().clone().requires_grad_()
                    leaves.append(value)
                return value
            if isinstance(value, Mapping):
                return {key: leaf(item) for key, item in value.items()}
            return tuple(leaf(item) for item in value) if isinstance(value, tuple) else value

        layer.zero_grad()
        with warnings.catch_warnings():
            if layer is theirs:  # it warns when a user-defined function meets no edges
                warnings.simplefilter("ignore")
            output = layer(its_graph, leaf(inputs), **leaf(keywords))
        keys = sorted(output) if isinstance(output, Mapping) else None
        outputs = flatten([output[key] for key in keys] if keys is not None else output)
        total = scalar(outputs)
        if total.requires_grad:
            total.backward()
        parameters = {name: p.grad for name, p in layer.named_parameters()}
        results.append((keys, outputs, [x.grad for x in leaves], parameters))

    (our_keys, our_outputs, our_grads, our_parameters) = results[0]
    (keys, outputs, grads, parameters) = results[1]
    assert our_keys == keys
    assert len(our_outputs) == len(outputs)
    for mine, other in zip(our_outputs, outputs, strict=True):
        assert_close(mine, other, "output")
    for index, (mine, other) in enumerate(zip(our_grads, grads, strict=True)):
        if mine is None or other is None:  # a leaf that one of them did not use: zero either way
            known = mine if mine is not None else other
            assert known is None or not known.any(), f"gradient of input {index}"
        else:
            assert_close(mine, other, f"gradient of input {index}")
    assert our_parameters.keys() == parameters.keys()
    for name, other in parameters.items():
        mine = our_parameters[name]
        if mine is None or other is None:
            known = mine if mine is not None else other
            assert known is None or not known.any(), f"gradient of {name}"
        else:
            assert_close(mine, other, f"gradient of {name}")
