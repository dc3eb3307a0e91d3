# SPDX-License-Identifier: Apache-2.0
"""``graphshard plan``: what a run will need, before it is paid for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from ..._base.settings import Unset
from ...data.settings import Preparation
from .._config import FullBatchConfig, SampledConfig
from ._options import is_partition, options_of, partition_json
from ._train import configured

if TYPE_CHECKING:
    from ...plan import Range, RunPlan


@options_of(FullBatchConfig, SampledConfig)
def plan(
    *,
    data: Annotated[
        str | None,
        "The JSON of a partition, whose parts are counted; or what 'graphshard partition --data' "
        "takes.",
        Unset("none: plain numbers"),
    ] = None,
    tables: Annotated[
        Path | None, "A TOML file that describes tables, as for partition.", Unset("none")
    ] = None,
    nodes: Annotated[str | None, "Plain numbers: nodes, such as 111e6.", Unset("none")] = None,
    edges: Annotated[
        str | None, "Plain numbers: edges, each direction counted.", Unset("none")
    ] = None,
    features: Annotated[int, "Plain numbers: width of the features."] = 128,
    classes: Annotated[int, "Plain numbers: classes."] = 40,
    train_nodes: Annotated[
        str | None, "Plain numbers: nodes that are trained on.", Unset("a tenth")
    ] = None,
    ranks: Annotated[
        str | None,
        "Numbers of ranks between commas.",
        Unset("those of the partition, or 1,2,4,8,16,32"),
    ] = None,
    mode: Annotated[
        Literal["full", "sample"] | None,
        "How to train.",
        Unset("full, and where that does not fit sample"),
    ] = None,
    method: Annotated[
        Literal["multilevel", "metis", "random"], "How nodes are assigned to parts."
    ] = "multilevel",
    memory: Annotated[str | None, "Of a host, such as 64GiB.", Unset("any")] = None,
    link: Annotated[
        str | None, "Between hosts, such as 10Gbit/s.", Unset("none: all ranks on one host")
    ] = None,
    ranks_per_host: Annotated[int, "Ranks that share the memory and the link of a host."] = 1,
    rates: Annotated[
        Path | None,
        "File of rates, that --save-rates wrote on such a machine.",
        Unset("measured here for 5 s"),
    ] = None,
    save_rates: Annotated[
        Path | None, "Write the rates that were measured to this file.", Unset("not")
    ] = None,
    json: Annotated[Path | None, "Also write the plan to this file.", Unset("not")] = None,
    **settings: Any,
) -> None:
    """Say what training will need by the number of ranks: time, memory, bytes sent, disk."""
    from ..._base.files import TemporaryFolder, writing
    from ...data import Tables, partition_tables
    from ...data.prepare import read_dataset
    from ...plan import Machines, Rates, make_plan, parse_bytes, parse_link
    from ...plan import read_rates as read_rates_file

    numbers = _ranks(ranks)
    machines = Machines(
        rates=Rates(),
        memory=None if memory is None else parse_bytes(memory),
        link=None if link is None else parse_link(link),
        ranks_per_host=_at_least_1("ranks_per_host", ranks_per_host),
    )
    if rates is not None and save_rates is not None:
        raise ValueError(
            "save_rates writes rates that are measured (got rates, too); leave one out"
        )
    given = [data is not None, tables is not None, nodes is not None or edges is not None]
    if sum(given) != 1:
        raise ValueError(
            "say of what to make a plan with one of --data, --tables, and --nodes and --edges "
            f"(got {'none' if not any(given) else 'several'})"
        )
    # The graph first: what is wrong with it shows before anything is measured.
    config = configured(data, mode, settings)
    from .._plan_inputs import (
        exchanges_of,
        facts_of,
        network_of,
        sampling_of,
        size_of_dataset,
        size_of_numbers,
        size_of_partition,
    )

    kind = "node classification"
    if data is not None and is_partition(Path(data)):
        graph, kind = size_of_partition(partition_json(Path(data)), config)
    elif data is not None:
        graph = size_of_dataset(read_dataset(data, Preparation()), config)
    elif tables is not None:
        with TemporaryFolder() as folder:  # one part, which takes the room of the tables
            parts = os.path.join(folder, "parts")
            made_of = partition_tables(Tables.from_toml(tables), 1, parts, quiet=True)
            graph, kind = size_of_partition(made_of, config)
        graph = replace(graph, parts=(), disk=0.0)
    else:
        if nodes is None or edges is None:
            raise ValueError("plain numbers are both --nodes and --edges; give the other one, too")
        graph = size_of_numbers(
            _number("nodes", nodes),
            _number("edges", edges),
            features,
            classes,
            None if train_nodes is None else _number("train_nodes", train_nodes),
        )
    resolved = config.resolved(facts_of(graph))
    network = network_of(resolved, graph, kind)
    if numbers is None:
        numbers = (len(graph.parts),) if graph.parts else (1, 2, 4, 8, 16, 32)
    if rates is not None:
        measured = read_rates_file(rates)
    else:
        from .._calibrate import TrialNetwork, calibrate

        own = partition_json(Path(data)) if data and is_partition(Path(data)) else None
        trial = TrialNetwork.of(resolved, graph, kind, own)
        measured = calibrate([machines.on_host(number) for number in numbers], network=trial)
        if save_rates is not None:
            measured.save(save_rates)
    machines = Machines(
        rates=measured,
        memory=machines.memory,
        link=machines.link,
        ranks_per_host=machines.ranks_per_host,
    )
    made = make_plan(
        graph,
        network,
        numbers,
        machines,
        exchanges=exchanges_of(config),
        aggregation=config.aggregation,
        sampling=sampling_of(config, resolved) if mode == "sample" else None,
        method=method,
    )
    made = replace(made, notes=(*made.notes, *_taken_for(config, kind)))
    if json is not None:
        with writing(json):
            json.write_text(dumps(made.as_dict(), indent=1) + "\n", encoding="utf-8")
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(
        plan_table(made, f"{config.model}, {resolved.layers} layers, hidden {resolved.hidden}")
    )
    for line in _lines(made):
        console.print(line, soft_wrap=True)


def _taken_for(config: FullBatchConfig | SampledConfig, kind: str) -> Iterator[str]:
    """What is planned in place of what was asked for."""
    if ":" in config.model:
        yield (
            f"what {config.model} takes is drawn on from two small graphs; its work, and rows of "
            "other ranks, are taken to be those of sage of the same width"
        )
    if not kind.startswith("node"):
        yield f"no epoch of {kind} on a sample was held against the rates"


def _ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError(
            f"ranks must be whole numbers from 1 up between commas, such as 2,4,8 (got {text!r})"
        )
    return tuple(dict.fromkeys(numbers))


def _at_least_1(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1 (got {value})")
    return value


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, such as 111e6 (got {text!r})") from None


def plan_table(made: RunPlan, network: str) -> Table:
    """A column for each number of ranks; figures with their spreads below them."""
    table = Table(title=f"{made.graph}: {network}", title_justify="left")
    table.add_column("ranks")
    for row in made.rows:
        table.add_column(str(row.ranks), justify="right")

    def line(name: str, cells: list[str]) -> None:
        table.add_row(name, *cells)

    line("mode", [_SHORT_MODES[row.mode] for row in made.rows])
    if any(row.steps > 1 for row in made.rows):
        line("steps", [f"{row.steps:,}" for row in made.rows])
    line("fits", ["yes" if row.fits else "no" for row in made.rows])
    line("bound by", [row.bound_by for row in made.rows])
    table.add_section()
    line("seconds per epoch", [_with_spread(row.seconds, 1.0) for row in made.rows])
    line("  computed", [_short(row.compute) for row in made.rows])
    line("  exchange, not hidden", [_short(row.exchange) for row in made.rows])
    table.add_section()
    line("GB sent by a rank", [_with_spread(row.sent, 1e9) for row in made.rows])
    line("GB on disk", [_short(row.disk / 1e9) for row in made.rows])
    table.add_section()
    line("GiB, largest rank", [_with_spread(row.memory, 2.0**30) for row in made.rows])
    for name in dict.fromkeys(name for row in made.rows for name in row.items):
        line(f"  {name}", [_short(row.items.get(name, 0) / 2**30) for row in made.rows])
    if any(row.not_validated for row in made.rows):
        table.add_section()
        line("not validated", [", ".join(row.not_validated) for row in made.rows])
    return table


_SHORT_MODES = {
    "full batch": "full",
    "full batch, rematerialized": "full, rematerialized",
    "full batch, features in files": "full, in files",
    "sampled": "sampled",
    "sampled, features in files": "sampled, in files",
}


def _lines(made: RunPlan) -> list[str]:
    cut = made.partitioning
    unit, name = (60.0, "min") if cut.seconds.expected > 100 else (1.0, "s")
    lines = [
        f"partitioning ({cut.method}) on one machine: {_spread(cut.seconds, unit)} {name} on 2 "
        f"cores, {_spread(cut.cpu_seconds, unit)} CPU {name}, {_spread(cut.memory, 2.0**30)} GiB "
        f"of memory, {_spread(cut.disk, 1e9)} GB of disk"
    ]
    if made.fewest is not None:
        lines.append(f"fewest ranks that fit: {made.fewest}")
    else:
        lines.append("none of these numbers of ranks fits; give more ranks or more memory")
    return lines + [f"note: {note}" for note in made.notes]


def _with_spread(figure: Range, unit: float) -> str:
    low, expected, high = (
        _short(value / unit) for value in (figure.low, figure.expected, figure.high)
    )
    return expected if low == high else f"{expected}\n{low} to {high}"


def _spread(figure: Range, unit: float) -> str:
    low, expected, high = (
        _short(value / unit) for value in (figure.low, figure.expected, figure.high)
    )
    return expected if low == high else f"{expected} ({low} to {high})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 0.1 else f"{value:.3g}"
