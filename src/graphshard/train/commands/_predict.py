# SPDX-License-Identifier: Apache-2.0
"""``graphshard predict``: what the model of a run says, by the user's ids, in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from rich.console import Console

from ..._base.settings import Unset
from ..launch import run_as_worker
from ._options import is_partition, options_of, partition_json


@options_of()
def predict(
    *,
    data: Annotated[Path, "The JSON of a partition: that of training, or one that fits it."],
    run: Annotated[Path, "Folder of the run, where its model is."],
    out: Annotated[Path, "File to write: .parquet, .csv or .csv.gz."],
    nodes: Annotated[
        str,
        "Which nodes: all, unlabelled, train, val or test; or a file or URI of ids, one a line, or "
        "a table with a column id.",
    ] = "all",
    embeddings: Annotated[bool, "Add a column with the input of the last layer."] = False,
    top: Annotated[
        int | None,
        "Show so many of the most probable classes; of links, for each node.",
        Unset("all classes, or 5 of more than 100; 10 links"),
    ] = None,
    pairs: Annotated[
        str | None,
        "Links: score these pairs of ids, a file or URI of a table with the columns source and "
        "target, and of several relations relation.",
        Unset("the best new links of each node"),
    ] = None,
    relations: Annotated[
        str | None,
        "Links: relations in which the best ones are looked for, names between commas.",
        Unset("all that were learnt"),
    ] = None,
    device: Annotated[
        str, "Where to compute: auto (a GPU, if torch sees one), cpu, cuda or cuda:N."
    ] = "auto",
    memory: Annotated[
        str | None,
        "What a worker may take, such as 2GiB: features stay in the files of the partition, and "
        "what layers give is in files, too.",
        Unset("all is in memory"),
    ] = None,
    timeout: Annotated[float, "Seconds that a wait for another worker may take."] = 300.0,
    quiet: Annotated[bool, "Print nothing but errors."] = False,
) -> None:
    """Predict by local workers, one for each part, or torchrun's, and write a file of the rows."""
    from ...partition.format import read_config
    from .._predict import PredictRequest, launch_prediction, prediction_work

    if not is_partition(data):
        raise ValueError(
            f"data must be the JSON of a partition (got {data}); run graphshard partition first"
        )
    request = PredictRequest(
        data=str(partition_json(data)),
        run=str(run),
        out=str(out),
        nodes=nodes,
        embeddings=embeddings,
        top=top,
        pairs=pairs,
        relations=relations,
        device=device,
        memory=memory,
        timeout=timeout,
    )
    console = Console(stderr=True, markup=False, emoji=False)

    def show(num_rows: int) -> None:
        if not quiet:
            console.print(f"wrote {num_rows:,} rows to {out}", markup=False, highlight=False)

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        run_as_worker(lambda: prediction_work(request, show))
    num_parts = read_config(request.data).num_parts
    show(
        launch_prediction(
            request,
            num_parts,
            on_stderr=lambda line: console.print(
                line, markup=False, highlight=False, soft_wrap=True
            ),
        )
    )
