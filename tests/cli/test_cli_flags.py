# SPDX-License-Identifier: Apache-2.0
"""All commands and flags. A change here is a change that users see: say it in the changelog."""

from __future__ import annotations

import dataclasses

import typer

from graphshard.cli import app
from graphshard.train import FullBatchConfig, SampledConfig

FLAGS = {
    "partition": """
        --balance-edges --balance-ntypes --balance-split --bidirected --data --help --hops
        --inverse --method --name --no-inverse --no-reorder --no-row-normalize --no-self-loops
        --objective --out --parts --quiet --reorder --row-normalize --seed --self-loops
        --tolerance
    """,
    "inspect": "--help --plot partition",
    "verify": "--checksums --help --no-checksums partition",
    "train": """
        --aggregation --aggregator --batch-size --cache-bytes --checkpoint-dir --data --dropout
        --dtype --epochs --eval-every --fanouts --halo-dtype --heads --help --hidden --layers --lr
        --map-features --mode --model --no-map-features --no-rematerialize --num-bases --patience
        --prefetch --quiet --rematerialize --replace --resume --sampler --save-every --seed
        --timeout --transport --weight-decay --workers
    """,
}


def flags_of(command: object) -> list[str]:
    context = typer.Context(command)  # type: ignore[arg-type]
    found = set()
    for parameter in command.get_params(context):  # type: ignore[attr-defined]
        found |= {*parameter.opts, *parameter.secondary_opts}
    return sorted(found)


def test_these_are_the_commands_and_their_flags() -> None:
    group = typer.main.get_command(app)
    assert {
        name: flags_of(command)
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    } == {name: sorted(flags.split()) for name, flags in FLAGS.items()}


def test_every_setting_of_a_run_has_a_flag() -> None:
    flags = set(FLAGS["train"].split())
    for field in (*dataclasses.fields(FullBatchConfig), *dataclasses.fields(SampledConfig)):
        assert f"--{field.name.replace('_', '-')}" in flags
