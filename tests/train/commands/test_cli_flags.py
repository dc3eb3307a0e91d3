# SPDX-License-Identifier: Apache-2.0
"""All commands and flags. A change here is a change that users see: say it in the changelog."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.utils import get_params_from_function

from graphshard._base.settings import OnlyWith, Unset, notes_of
from graphshard.train import FullBatchConfig, RunConfig, SampledConfig
from graphshard.train.commands import app, run

FLAGS = {
    "partition": """
        --balance-edges --balance-ntypes --balance-split --bidirected --config --dangling --data
        --delimiter --edges --encoding --encodings-from --format --header --help --hops --ignore
        --inverse --label --label-task --links --memory --method --name --no-header --no-inverse
        --no-reorder --no-row-normalize --no-self-loops --node-id --nodes --null --objective --out
        --parallel --parts --quiet --relation-column --reorder --row-normalize --seed --self-loops
        --separator --source --split --split-files --tables --target --time --tolerance --weight
    """,
    "tables": """
        --config --dangling --delimiter --edges --encoding --format --header --help --ignore --label
        --label-task --links --no-header --node-id --nodes --null --parallel --relation-column
        --separator --source --split --split-files --target --time --weight
    """,
    "inspect": "--config --help --plot --sums partition",
    "convert": "--config --help --out --to source",
    "copy": """
        --config --help --ip-config --ip_config --part-config --part_config --rel-data-path
        --rel_data_path --script-folder --script_folder --ssh-command --ssh-port --ssh-username
        --ssh_command --ssh_port --ssh_username --timeout --workspace
    """,
    "launch": """
        --config --extra-envs --extra_envs --graph-format --graph_format --help --ip-config
        --ip_config --local --log-dir --log_dir --num-clients --num-omp-threads --num-samplers
        --num-server-threads --num-servers --num-trainers --num_clients --num_omp_threads
        --num_samplers --num_server_threads --num_servers --num_trainers --part-config --part_config
        --python --server-options --server_options --slurm --ssh-command --ssh-port --ssh-username
        --ssh_command --ssh_port --ssh_username --start-timeout --start_timeout --timeout
        --tls-certificate --tls-key --tls_certificate --tls_key --workspace script
    """,
    "predict": """
        --config --data --device --embeddings --help --memory --nodes --out --pairs --quiet
        --relations --run --timeout --top
    """,
    "serve": """
        --config --help --host --ip-config --listen --log-level --restore --tls-certificate
        --tls-key partition
    """,
    "trace": "--config --help --no-plot --operators --out --plot --steps --warm-up run",
    "verify": "--checksums --config --help --no-checksums partition",
    "plan": """
        --aggregation --aggregator --autocast --batch-size --both-directions --cache-bytes
        --checkpoint-dir --class-weights --classes --clip-norm --config --data --device --dropout
        --dtype --edges --encoder --epochs --eval-every --exclude-targets --fanouts --features
        --halo-dtype --heads --help --hidden --json --layers --link --loss --lr --map-features
        --memory --method --metrics --mode --model --model-args --negatives --no-both-directions
        --no-encoder --no-exclude-targets --no-map-features --no-norm --no-rematerialize
        --no-residual --no-self-loops --nodes --norm --num-bases --optimizer --patience --plot
        --predictor --prefetch --ranks --ranks-per-host --rates --relations --rematerialize
        --replace --residual --resume --run --sampler --save-every --save-rates --schedule --seed
        --self-loops --tables --task --tensorboard --timeout --train-nodes --transport --warmup
        --weight-decay
    """,
    "train": """
        --aggregation --aggregator --autocast --batch-size --both-directions --cache-bytes
        --checkpoint-dir --class-weights --clip-norm --config --data --device --dropout --dtype
        --encoder --epochs --eval-every --exclude-targets --fanouts --halo-dtype --heads --help
        --hidden --layers --loss --lr --map-features --memory --metrics --mode --model --model-args
        --negatives --no-both-directions --no-encoder --no-exclude-targets --no-map-features
        --no-norm --no-rematerialize --no-residual --no-self-loops --norm --num-bases --optimizer
        --patience --plot --predictor --prefetch --quiet --relations --rematerialize --replace
        --residual --resume --run --sampler --save-every --schedule --seed --self-loops --task
        --tensorboard --timeout --transport --warmup --weight-decay --workers
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


# Shows the help text of every command, and says which modules that take long were imported: for
# the first of them, which is verify, and for all.
SHOW_ALL_HELP = """
import sys
from graphshard.train.commands import run
slow = {"numpy", "torch", "pyarrow", "pydantic", "graphshard.graph"}
of_others = {"graphshard.train._config", "graphshard.train.commands._train", "tempfile"}
for number, command in enumerate(sys.argv[1:]):
    assert run([*command.split(), "--help"]) == 0
    if number == 0:
        print("imported:", *(slow | of_others) & set(sys.modules))
print("imported:", *slow & set(sys.modules))
"""


def test_no_help_text_needs_torch() -> None:
    """What a help text is made of can be imported within a moment."""
    shown = subprocess.run(
        [sys.executable, "-c", SHOW_ALL_HELP, "verify", "", *FLAGS],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert shown.stdout.count("Usage: graphshard") == len(FLAGS) + 2
    said = [line.split() for line in shown.stdout.splitlines() if line.startswith("imported:")]
    assert said == [["imported:"], ["imported:"]]


def test_paragraphs_of_help_texts_fill_their_lines() -> None:
    for name, command in typer.main.get_command(app).commands.items():
        assert command.help, name
        assert all("\n" not in paragraph for paragraph in command.help.split("\n\n")), name


def test_every_setting_of_a_run_has_a_flag() -> None:
    flags = set(FLAGS["train"].split())
    for field in (*dataclasses.fields(FullBatchConfig), *dataclasses.fields(SampledConfig)):
        assert f"--{field.name.replace('_', '-')}" in flags


def test_options_are_what_the_fields_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Default, choices and help of an option stand in the annotation of its field alone."""
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    options = {parameter.name: parameter for parameter in command.params}
    inherited = {field.name for field in dataclasses.fields(RunConfig)} - {"data"}
    for kind in (FullBatchConfig, SampledConfig):
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind)[1:]:
            option = options[field.name]
            of_type, text, *_ = get_args(hints[field.name])
            assert text in option.help
            has_default = field.name in inherited and not notes_of(hints[field.name], OnlyWith)
            has_default = has_default and not notes_of(hints[field.name], Unset)
            assert option.default == (field.default if has_default else None)
            for choice in (of_type, *get_args(of_type)):
                if get_origin(choice) is Literal:
                    assert run(["train", "--data", "x", option.opts[0], "none such"]) == 2
                    listed = ", ".join(map(repr, get_args(choice)))
                    assert f": 'none such' is not one of {listed}." in capsys.readouterr().err


def shown_help(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """What ``--help`` prints, without the lines of its boxes and the breaks between words."""
    monkeypatch.setenv("COLUMNS", "4000")
    assert run([command, "--help"]) == 0
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", capsys.readouterr().out).split())


@pytest.mark.parametrize("command", list(FLAGS))
def test_help_is_shown_as_it_is_written_with_every_default(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    callback = compiled.callback.__wrapped__  # the command without typer's wrapper
    shown = shown_help(command, capsys, monkeypatch)
    for sentence in (callback.__doc__ or "").split("\n\n"):
        assert " ".join(sentence.split()) in shown
    options = {option.name: option for option in compiled.params}
    written = get_params_from_function(callback)
    assert set(options) == set(written)
    for name, parameter in written.items():
        text = " ".join(parameter.default.help.split())
        option = options[name]
        if getattr(option, "hidden", False):
            continue
        assert text in shown, f"--{name}: its help is not shown as it is written"
        if option.required:
            continue
        has_word = "default:" in text or f"{text} [default: " in shown
        assert has_word, f"--{name} of {command} does not say what its default is"
        if option.default is not None and not option.is_flag:
            assert f"{text} [default: {option.default}]" in shown or option.default == ""


def test_defaults_of_a_run_are_those_of_its_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = shown_help("train", capsys, monkeypatch)
    for kind in (FullBatchConfig, SampledConfig):
        for model in ("gcn", "gat", "rgcn"):
            resolved = kind(data="x", model=model).resolved()
            for name in ("hidden", "dropout", "lr", "weight_decay", "epochs", "patience", "layers"):
                text = get_args(get_type_hints(kind, include_extras=True)[name])[1]
                (words,) = re.findall(re.escape(text) + r" \[default: \((.*?)\)\]", shown)
                first, *others = words.split("; ")
                values = dict(word.split(": ") for word in others)
                assert float(values.get(model, first)) == getattr(resolved, name)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("train --color red", "graphshard train"),
        ("partition --parts 2", "graphshard partition"),
        ("inspect", "graphshard inspect"),
        ("paint", "graphshard"),
    ],
)
def test_an_error_of_usage_names_the_command_whose_help_to_read(
    line: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    assert capsys.readouterr().err.endswith(f" (see {command} --help)\n")
