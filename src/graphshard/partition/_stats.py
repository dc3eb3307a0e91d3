# SPDX-License-Identifier: Apache-2.0
"""PartitionStats: how good a partition is, in numbers that a plan for training needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from rich.table import Table

from ._metis import IntArray
from .assign import Constraint
from .checked_files import listing, mapping, only_keys, required, shown, text, whole_number


@dataclass(frozen=True)
class Balance:
    """How evenly one constraint is met.

    Args:
        loads: Weight of each part.
    """

    name: str
    loads: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Heaviest part over the mean; 1 is perfect (also when there is nothing to share)."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    @staticmethod
    def table(title: str, heading: str, items: Iterable[Balance]) -> Table:
        """A table to print with rich: a row per item, as wide for a thousand parts as for two."""
        table = Table(title=title, title_justify="left")
        table.add_column(heading, overflow="fold")
        for name in ("total", "lightest", "heaviest", "in part", "max/mean"):
            table.add_column(name, justify="right", no_wrap=True)
        for item in items:
            loads = item.loads
            numbers = (f"{number:,}" for number in (sum(loads), min(loads), max(loads)))
            table.add_row(item.name, *numbers, str(loads.index(max(loads))), f"{item.ratio:.3f}")
        return table


@dataclass(frozen=True)
class PartSizes:
    """What one part holds.

    Args:
        inner_nodes: Nodes that it owns.
        halo_nodes: Nodes of others that it keeps a number of.
        inner_edges: In-edges of its nodes.
        outer_edges: Other edges that it keeps.
        cut_edges: Inner edges whose source another part owns.
        bytes: Size of its files.
    """

    inner_nodes: int
    halo_nodes: int
    inner_edges: int
    outer_edges: int
    cut_edges: int
    bytes: int


@dataclass(frozen=True)
class PartitionStats:
    """Measures of a partition.

    Args:
        part_method: "metis", "multilevel", "random" or "custom".
        tolerance: Ratio that was asked for.
    """

    graph_name: str
    num_nodes: int
    num_edges: int
    part_method: str
    tolerance: float
    parts: tuple[PartSizes, ...]
    balances: tuple[Balance, ...]

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def edge_cut(self) -> int:
        """Edges whose two ends are in different parts."""
        return sum(part.cut_edges for part in self.parts)

    @property
    def edge_cut_fraction(self) -> float:
        return self.edge_cut / self.num_edges if self.num_edges else 0.0

    @property
    def halo_nodes(self) -> int:
        """Nodes held a second time, summed over the parts."""
        return sum(part.halo_nodes for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as the partition's JSON keeps them."""
        content = asdict(self)
        content["parts"] = list(content["parts"])
        content["balances"] = [
            {"name": item.name, "loads": list(item.loads), "ratio": round(item.ratio, 6)}
            for item in self.balances
        ]
        content["edge_cut"] = self.edge_cut
        content["edge_cut_fraction"] = round(self.edge_cut_fraction, 6)
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PartitionStats:
        """Inverse of `as_dict`."""
        content = mapping(content, "stats")
        parts = listing(required(content, "parts"), "parts")
        balances = listing(required(content, "balances"), "balances")
        return cls(
            graph_name=text(required(content, "graph_name"), "graph_name"),
            num_nodes=whole_number(required(content, "num_nodes"), "num_nodes"),
            num_edges=whole_number(required(content, "num_edges"), "num_edges"),
            part_method=text(required(content, "part_method"), "part_method"),
            tolerance=_ratio(required(content, "tolerance")),
            parts=tuple(_sizes(part) for part in parts),
            balances=tuple(_balance(item, len(parts)) for item in balances),
        )

    def table(self) -> Table:
        """A table to print with rich: a row per part, a column per measure, ratios at the foot."""
        table = Table(
            title=(
                f"{self.graph_name}: {self.num_parts} parts ({self.part_method}), edge cut "
                f"{self.edge_cut} of {self.num_edges} ({100 * self.edge_cut_fraction:.2f} %)"
            ),
            title_justify="left",
            show_footer=True,
        )
        table.add_column("part", "max/mean", justify="right", min_width=len("max/mean"))
        columns: dict[str, list[int]] = {
            "inner nodes": [part.inner_nodes for part in self.parts],
            "halo nodes": [part.halo_nodes for part in self.parts],
            "inner edges": [part.inner_edges for part in self.parts],
            "cut edges": [part.cut_edges for part in self.parts],
            "kB": [round(part.bytes / 1000) for part in self.parts],
        }
        for name, values in columns.items():
            ratio = Balance(name, tuple(values)).ratio
            table.add_column(name, f"{ratio:.3f}", justify="right", overflow="fold")
        for part, numbers in enumerate(zip(*columns.values(), strict=True)):
            table.add_row(str(part), *map("{:,}".format, numbers))
        return table

    def balance_table(self) -> Table:
        """A table to print with rich: a row per constraint, its loads and how even they are."""
        title = f"balance (tolerance {self.tolerance:g})"
        return Balance.table(title, "constraint", self.balances)


def measure_balance(
    constraints: Sequence[Constraint], parts: IntArray, num_parts: int
) -> tuple[Balance, ...]:
    """Loads of every constraint under an assignment."""
    balances = []
    for constraint in constraints:
        loads = np.bincount(parts, weights=constraint.weights, minlength=num_parts)
        balances.append(Balance(constraint.name, tuple(loads.astype(np.int64).tolist())))
    return tuple(balances)


def _ratio(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise ValueError(f"tolerance must be a number from 1 up (got {shown(value)})")
    return value


def _sizes(content: Any) -> PartSizes:
    names = [field.name for field in fields(PartSizes)]
    only_keys(mapping(content, "the sizes of a part"), names, "the sizes of a part")
    return PartSizes(**{name: whole_number(content[name], name) for name in names})


def _balance(content: Any, num_parts: int) -> Balance:
    item = mapping(content, "a balance")
    name, loads = required(item, "name"), required(item, "loads")
    if not isinstance(name, str):
        raise ValueError(f"the name of a balance must be a text (got {shown(name)})")
    if len(listing(loads, "loads")) != num_parts or not loads:
        raise ValueError(f"loads must hold a number for each of the {num_parts} parts")
    return Balance(name, tuple(whole_number(load, "a load") for load in loads))
