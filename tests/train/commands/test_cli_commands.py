# SPDX-License-Identifier: Apache-2.0
"""The commands, called in this process, or forked; training starts two workers.

Workers are interpreters in one test, forked in the others.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphshard
from forked_programs import run_program, start_program
from graphshard.graph import load_graphs, save_graphs
from graphshard.train import EpochReport, Evaluation, read_task
from graphshard.train.commands import run
from graphshard.train.commands._options import is_partition, partition_json
from graphshard.train.commands._train import ProgressDisplay
from type_name_cases import RELATIONS, SIZES, named

GRAPH = [(0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4)]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("GRAPHSHARD_TRACEBACK", raising=False)


@pytest.fixture(scope="module")
def cora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cora in two parts."""
    folder = tmp_path_factory.mktemp("cora")
    arguments = "partition --data cora --parts 2 --quiet --method random --out".split()
    assert run([*arguments, str(folder)]) == 0
    return folder / "cora.json"


def call(arguments: Sequence[object]) -> int:
    return run([str(argument) for argument in arguments])


def test_partition_needs_no_code_of_runs(tmp_path: Path) -> None:
    words = ["partition", "--data", "cora", "--parts", "1", "--quiet", "--out", str(tmp_path / "p")]
    program = (
        "import sys; from graphshard.train.commands import run; "
        f"assert run({words}) == 0; print(*sys.modules)"
    )
    modules = run_program(program).split()
    assert "graphshard.data.task" in modules
    assert not {f"graphshard.train.{name}" for name in ("_run", "_models")} & set(modules)


def test_partition_writes_prints_and_describes_the_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "parts"
    arguments = f"partition --data cora --parts 2 --out {out} --balance-edges --balance-split"
    assert call(arguments.split()) == 0
    printed = capsys.readouterr()
    assert "cora: 2 parts (metis)" in printed.out
    assert f"wrote {out / 'cora.json'}" in printed.out
    assert printed.err == ""
    task = read_task(out / "cora.json")
    assert (task.name, task.target, task.num_classes) == ("cora", "_N", 7)
    graph, feats, *_ = graphshard.partition.load_partition(out / "cora.json", 0)
    src, dst = graph.edges()
    inner = graph.ndata["inner_node"].bool()
    assert int((src == dst).sum()) == int(inner.sum())  # a self loop each
    rows = feats["_N/feat"].sum(1)
    assert np.allclose(rows.numpy(), 1.0)


def test_partition_takes_the_features_as_they_are_if_told(tmp_path: Path) -> None:
    out = tmp_path / "parts"
    arguments = f"partition --data cora --parts 1 --out {out} --no-row-normalize --no-self-loops"
    assert call([*arguments.split(), "--quiet", "--name", "raw"]) == 0
    graph, feats, *_ = graphshard.partition.load_partition(out / "raw.json", 0)
    assert set(feats["_N/feat"].unique().tolist()) == {0.0, 1.0}
    assert graph.num_edges() == 10556


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_partition_takes_edge_lists(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = zip(*GRAPH, strict=True)
    table = tmp_path / f"edges{suffix}"
    graph = graphshard.graph((list(src), list(dst)))
    (graphshard.to_csv if suffix == ".csv" else graphshard.to_parquet)(graph, table)
    out = tmp_path / "parts"
    arguments = f"partition --data {table} --parts 2 --out {out} --bidirected --self-loops"
    assert call(arguments.split()) == 0
    content = json.loads((out / "edges.json").read_text())
    assert content["num_edges"] == 2 * len(GRAPH) + 8
    assert call(["inspect", out]) == 0
    assert "edges: 2 parts" in capsys.readouterr().out


@pytest.mark.usefixtures("forked_interpreters")
def test_a_graph_that_cannot_be_trained_on_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "edges.csv"
    table.write_text("src,dst\n0,1\n1,0\n")
    assert call(["train", "--data", table, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: one node type must have the feature 'label'")
    assert "graphshard partition --label" in error
    assert error.count("\n") == 1


def test_partition_takes_a_folder_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "datasets" / "tiny"
    folder.mkdir(parents=True)
    np.save(folder / "edge_index.npy", np.array(GRAPH).T)
    np.save(folder / "edge_type.npy", np.arange(9) % 2)
    np.save(folder / "label.npy", np.array([0, 1, 0, 1, 0, 1, 0, -1]))
    np.save(folder / "train_idx.npy", np.array([0, 1, 2]))
    monkeypatch.setenv("GRAPHSHARD_DATASETS", str(tmp_path / "datasets"))
    out = tmp_path / "parts"
    flags = ["--balance-ntypes", "label", "--hops", 0, "--objective", "vol", "--tolerance", 1.5]
    assert call(["partition", "--data", "tiny", "--parts", 2, "--out", out, *flags]) == 0
    task = read_task(out / "tiny.json")
    assert task.num_relations == 4  # the inverse of each was added
    assert json.loads((out / "tiny.json").read_text())["num_edges"] == 18


def test_inspect_shows_types_balance_and_task(
    cora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "cora.png"
    assert call(["inspect", cora, "--sums", "--plot", picture]) == 0
    printed = capsys.readouterr().out
    for text in (
        "_N:_E:_N",
        "cora: 2 parts (random)",
        "max/mean",
        "into 7 classes",
        "partial sums",
    ):
        assert text in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_types_of_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are shown as they are, and are no markup, no emoji and no formula."""
    monkeypatch.setenv("COLUMNS", "300")
    graph = named()
    dollars = {(s, f"{r}$\\x{{$", d): graph.edges(etype=(s, r, d)) for s, r, d in RELATIONS}
    renamed: Any = graphshard.heterograph(dollars, SIZES)
    for ntype, fields in ((t, graph.nodes[t].data) for t in SIZES):
        renamed.nodes[ntype].data.update(dict(fields.items()))
    save_graphs(tmp_path / "kg.bin", renamed)
    command = ["partition", "--data", tmp_path / "kg.bin", "--parts", "2", "--out", tmp_path / "p"]
    assert call([*command, "--method", "random"]) == 0
    parts, picture = tmp_path / "p" / "kg.json", tmp_path / "kg.png"
    assert call(["inspect", parts, "--plot", picture]) == 0
    printed = capsys.readouterr().out
    for etype in renamed.canonical_etypes:
        assert ":".join(etype) in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert call(["verify", parts]) == 0
    assert call(["convert", parts, "--out", tmp_path / "again", "--to", "graphshard"]) == 0
    assert call(["verify", tmp_path / "again"]) == 0
    assert call(["convert", tmp_path / "kg.bin", "--out", tmp_path / "again.bin"]) == 0
    (again,), _ = load_graphs(tmp_path / "again.bin")
    assert again.canonical_etypes == renamed.canonical_etypes


def test_inspect_without_matplotlib_names_the_extra(
    cora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(["inspect", cora, "--plot", tmp_path / "cora.png"]) == 2
    assert 'pip install "graphshard[plot]"' in capsys.readouterr().err


def test_verify_tells_whole_from_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"partition --data cora --parts 2 --quiet --method random --out {tmp_path}"
    assert call(arguments.split()) == 0
    assert call(["verify", tmp_path / "cora.json"]) == 0
    assert "cora.json: whole" in capsys.readouterr().out
    damaged = tmp_path / "part1" / "node_feats.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    assert call(["verify", tmp_path]) == 1
    printed = capsys.readouterr()
    assert "node_feats.safetensors is damaged" in printed.out
    assert printed.err == ""


WRONG_INPUTS = {
    "partition --parts 2 --out OUT": "with one of --data, --tables, and --nodes and --edges",
    "partition --data nowhere --parts 2 --out OUT": "no data set 'nowhere'",
    "partition --data nowhere.csv --parts 2 --out OUT": "there is no file or folder nowhere.csv",
    "partition --data cora --parts 0 --out OUT": "parts must be at least 1 (got 0)",
    "partition --data cora --parts two --out OUT": "Invalid value for '--parts'",
    "partition --data cora --parts 2 --out OUT --method spectral": "Invalid value for '--method'",
    "partition --data cora --parts 2 --out OUT --tolerance 0.5": "tolerance must be at least 1",
    "partition --data cora --parts 2 --out OUT --memory 64": "memory cannot be bounded with",
    "partition --data cora --parts 2 --out OUT --method random --memory 8": "at least 16 MiB",
    "partition --data cora --parts 2 --out OUT --hops -1": "num_hops",
    "partition --data cora --parts 2 --out OUT --inverse": "have none; use to_bidirected|has none",
    "partition --data cora --parts 2 --out OUT --balance-ntypes color": "must name a node feature",
    "partition --data cora --parts 2 --out OUT --balance-ntypes feat": "one value per node",
    "partition --data cora --parts 2 --out OUT --color red": "No such option",
    "inspect nowhere.json": "does not exist",
    "inspect CORA --plot cora.pdf": "ends in .png",
    "inspect CORA --plot /nowhere/cora.png": "in a folder that exists",
    "verify nowhere.json": "does not exist",
    "verify EMPTY": "is not JSON",
    "train --data nowhere.json": "does not exist",
    "train --data nowhere": "no data set 'nowhere'",
    "train --data CORA --workers 3": "has 2 parts, which need as many workers (got 3)",
    "train --data CORA --workers 0": "workers must be at least 1 (got 0)",
    "train --data CORA --model mlp": "model must be one of gcn, sage, gat, gatv2, rgcn, hgt",
    "train --data CORA --mode sampled": "Invalid value for '--mode'",
    "train --data CORA --dropout 2": "dropout must be in [0, 1) (got 2.0)",
    "train --data CORA --epochs 0": "epochs must be at least 1",
    "train --data CORA --heads 3": "heads is for the model gat",
    "train --data CORA --save-every 3": "save_every needs checkpoint_dir",
    "train --data CORA --timeout 0": "timeout must be a positive number of seconds",
    "train --data CORA --fanouts 5,5": "fanouts is for mode sample (got fanouts=(5, 5), full); "
    "give --mode sample, or leave out fanouts",
    "train --data CORA --no-map-features": "map_features is for mode sample",
    "train --data CORA --mode sample --no-rematerialize": "rematerialize is for mode full",
    "train --data CORA --mode sample --fanouts 5;5": "whole numbers between commas",
    "train --data CORA --mode sample --fanouts 5,5 --layers 3": "fanouts must hold one number per",
    "train --data CORA --mode sample --sampler walk": "Invalid value for '--sampler'",
    "train --data CORA --mode sample --fanouts 10": "one number makes a network of one layer",
    "train --data CORA --aggregator mean": "aggregator is for the model sage",
    "train --data CORA --heads 1": "heads is for the model gat",
    "train --data CORA --num-bases 0": "num_bases is for the model rgcn",
    "train --data CORA --aggregation oneshot --rematerialize": "for the aggregation sequential or",
    "train --data CORA --aggregation oneshot --prefetch 1": "for the aggregation sequential or",
    "train --data CORA --mode sample --sampler labor --replace": "is for the sampler neighbor",
    "train --data CORA --checkpoint-dir c": "checkpoint_dir has no effect without save_every",
    "train --data CORA --lr 1e38": "lr must be at most 1e+37 (got 1e+38)",
    "train --data CORA --timeout 1e12": "timeout must be at most 1,000,000,000 seconds",
    "train --data cora --workers 5000": "no more parts, or workers, than nodes of cora, 2708",
    "partition --data cora --parts 5000 --out OUT": "than nodes of cora, 2708 (got 5000)",
    "partition --data cora --parts 2 --out OUT --method random --objective cut": "for the method",
    "partition --data EDGES --parts 2 --out OUT --quiet --balance-split": "needs masks among",
    "partition --data EDGES --parts 2 --out OUT --quiet --balance-ntypes label": "name a field",
    "copy --ip-config IPS --part-config CORA --workspace w --timeout -1": "timeout must be above 0",
    "copy --ip-config IPS --part-config CORA --workspace w --ssh-port 0": "from 1 to 65535 (got 0)",
    "launch --local 2 --part-config CORA --ssh-port 22 x.py": "--ssh-port is for hosts of --ip-",
    "launch --local 2 --part-config CORA --ssh-username me x.py": "--ssh-username is for hosts of",
    "launch --local 2 --part-config CORA --python py x.py": "runs this interpreter (got py)",
    "launch --local 2 --part-config CORA --num-omp-threads 0 x.py": "must be at least 1 (got 0)",
    "launch --local 2 --part-config CORA --timeout inf x.py": "must be at most 1,000,000,000",
    "paint": "No such command",
}


@pytest.mark.parametrize("line", list(WRONG_INPUTS))
def test_wrong_input_is_one_line_and_exit_code_2(
    line: str, cora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("")
    edges, hosts = tmp_path / "edges.csv", tmp_path / "hosts.txt"
    edges.write_text("src,dst\n0,1\n2,3\n")
    hosts.write_text("127.0.0.1\n")
    places = {"CORA": str(cora), "OUT": str(tmp_path / "out"), "EMPTY": str(empty)}
    places |= {"EDGES": str(edges), "IPS": str(hosts)}
    assert call([places.get(word, word) for word in line.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert any(text in printed.err for text in WRONG_INPUTS[line].split("|"))


def test_a_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        call("partition --data nowhere --parts 2 --out x".split())


def test_a_partition_by_its_folder_or_without_its_ending(
    tmp_path: Path, cora: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = partition_json(cora)
    assert partition_json(cora.parent) == partition_json(cora.with_suffix("")) == whole == cora
    assert not is_partition(tmp_path / "none")
    monkeypatch.chdir(cora.parent)  # where a name alone is that of a data set
    assert partition_json(Path("cora")) == Path("cora")
    for name in ("cora", "other"):
        (tmp_path / f"{name}.json").write_text("{}")
    (tmp_path / "part0").mkdir()
    for words in (["inspect"], ["train", "--quiet", "--data"]):
        assert call([*words, tmp_path]) == 2
        error = capsys.readouterr().err
        assert "must be one partition (got cora.json, other.json); name the JSON of one" in error
        assert error.count("\n") == 1


@pytest.mark.usefixtures("nested_forks")
def test_train_partitions_a_data_set_first_and_shows_a_table(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = "--model sage --workers 2 --epochs 3 --timeout 60 --save-every 3 --checkpoint-dir"
    assert call(["train", "--data", "cora", *flags.split(), tmp_path / "c"]) == 0
    printed = capfd.readouterr()
    assert "partitioned cora into 2" in printed.err
    assert "epoch 3/3 loss" in printed.err
    assert "Traceback" not in printed.err
    for text in (
        "sage, 2 worker(s)",
        "train accuracy",
        "valid accuracy",
        "test accuracy",
        "seconds per epoch",
        "peak memory per worker",
        "bytes sent per epoch",
    ):
        assert text in printed.out
    assert (tmp_path / "c" / "epoch-00000003" / "manifest.json").exists()


@pytest.mark.usefixtures("forked_interpreters")
def test_train_on_samples_shows_the_same_table_and_more(
    capfd: pytest.CaptureFixture[str], cora: Path
) -> None:
    flags = "--mode sample --model sage --fanouts 5,5 --batch-size 20 --epochs 2 --timeout 60"
    more = "--sampler labor --transport replicated --no-map-features --cache-bytes 1000000"
    assert call(["train", "--data", str(cora), *flags.split(), *more.split()]) == 0
    printed = capfd.readouterr()
    assert "epoch 2/2 loss" in printed.err
    assert "Traceback" not in printed.err
    for text in (
        "sage, 2 worker(s), sampled",
        "test accuracy",
        "bytes sent per epoch",
        "steps per epoch",
        "seconds waiting for data",
        "edges sampled per second",
        "cache hit rate",
    ):
        assert text in printed.out


def test_ranks_of_torchrun_run_the_same_command(cora: Path) -> None:
    """Processes that have what torchrun tells its own: that they are, and who starts them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["train", "--data", str(cora), "--epochs", "2", "--timeout", "60"]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "a job", "COLUMNS": "200"}
    common |= {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start_program(MAIN, *words, RANK=r, LOCAL_RANK=r, **common) for r in ("0", "1")]
    try:
        (shown, error), (other, _) = (rank.communicate(timeout=100) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], error
    assert "gcn, 2 worker(s)" in shown
    assert shown.count("test accuracy") == 1
    assert other == ""


@pytest.mark.exhaustive  # the README's example is under torchrun, and the test above is its ranks
@pytest.mark.timeout(180)
def test_torchrun_runs_the_same_command(cora: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    # A rendezvous of its own on a free port, as --standalone, without looking up the host's name.
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr"]
    command += ["127.0.0.1", "-m", "graphshard", "train", "--data", str(cora), "--epochs", "2"]
    done = subprocess.run(
        [*command, "--timeout", "60"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "gcn, 2 worker(s)" in done.stdout
    assert done.stdout.count("test accuracy") == 1


def test_python_m_graphshard_is_the_command() -> None:
    program = "import runpy; runpy.run_module('graphshard', run_name='__main__')"
    assert run_program(program, "--version").strip() == graphshard.__version__


#: The command, as a program.
MAIN = "from graphshard.train.commands import main; main()"


def environment() -> dict[str, str]:
    """Children find the modules that this process finds, and the loopback interface."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": path}


def test_under_torchrun_wrong_input_is_told_before_ranks_meet(
    cora: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call(["train", "--data", cora, "--workers", 3]) == 2
    assert "torchrun started 2 workers, and workers says 3" in capsys.readouterr().err
    assert call(["train", "--data", "cora"]) == 2
    assert "must be the JSON of a partition" in capsys.readouterr().err


def report(epoch: int, note: str | None = None) -> EpochReport:
    evaluation = Evaluation(epoch=epoch, accuracy={"val": 0.5, "test": 0.25}, val_loss=1.0)
    if note is not None:
        return EpochReport(epoch=epoch, epochs=40, note=note)
    return EpochReport(epoch=epoch, epochs=40, loss=1.5, evaluation=evaluation)


def test_progress_off_a_terminal_is_ten_lines_and_the_notes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for quiet in (False, True):
        with ProgressDisplay(quiet) as display:
            display.show(report(0, "resumed from epoch 0"))
            for epoch in range(1, 41):
                display.show(report(epoch))
            display.show(EpochReport(epoch=40, epochs=40, note="not learnt", is_warning=True))
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == ("not learnt" if quiet else "resumed from epoch 0")
        assert len(lines) == (1 if quiet else 12)
    assert "epoch 4/40 loss 1.5000  valid 50.0  test 25.0" not in lines


def test_steps_inside_an_epoch_move_the_bar_and_print_no_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = EpochReport(epoch=1, epochs=4, loss=0.5, step=3, steps=4)
    with ProgressDisplay() as display:
        display.show(inside)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressDisplay() as display:
        display.show(inside)
        assert display._bar is not None
        assert display._bar.tasks[0].completed == 1.75
    assert "1/4" in capsys.readouterr().err


def test_progress_on_a_terminal_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressDisplay() as display:
        for epoch in range(1, 41):
            display.show(report(epoch))
    printed = capsys.readouterr().err
    assert "40/40" in printed
    assert "valid 50.0" in printed


def test_a_disk_without_room_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: what the system says differs."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
    arguments = f"partition --data cora --parts 2 --method random --quiet --out {tmp_path / 'p'}"
    program = start_program(limit + MAIN, *arguments.split())
    try:
        _, error = program.communicate()
    finally:
        program.kill()
    assert program.returncode == 2, error
    assert re.search(r"/p/\S+ cannot be written \(File too large\); raise the limit", error), error
    assert len(error.splitlines()) == 1, error
    assert not list((tmp_path / "p").iterdir())


@pytest.mark.filterwarnings("default")
def test_what_dgl_s_launcher_has_and_ours_needs_not_is_a_warning_line(
    cora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "--num-servers 2 --num_samplers 0 --graph-format coo"
    arguments = ["launch", "--local", 3, "--part-config", cora, *more.split(), "x.py"]
    assert call(arguments) == 2  # of hosts than parts, before anything starts
    *told, error = capsys.readouterr().err.splitlines()
    assert [line.partition(" has no effect")[0] for line in told] == [
        "warning: --num-servers 2",
        "warning: --graph-format coo",
    ]
    assert error.startswith("error: ")


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("forked_interpreters")
def test_labels_with_gaps_and_splits_that_overlap_are_a_warning_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gaps"
    folder.mkdir()
    np.save(folder / "edge_index.npy", np.array(GRAPH).T)
    np.save(folder / "label.npy", np.array([0, 1, 2000, 1, 0, 1, 0, -1]))
    np.save(folder / "train_idx.npy", np.array([0, 1, 2]))
    np.save(folder / "test_idx.npy", np.array([2, 3]))
    arguments = ["partition", "--data", folder, "--parts", 1, "--self-loops", "--quiet"]
    assert call([*arguments, "--out", tmp_path / "p"]) == 0
    expected = [
        "warning: gaps has 2001 classes, of which 1998 have no node (2, 3, 4, ...), because",
        "warning: gaps has 1 labelled nodes in both train_mask and test_mask, so that accuracy",
    ]
    for line, text in zip(capfd.readouterr().err.splitlines(), expected, strict=True):
        assert line.startswith(text)
    data = tmp_path / "p" / "gaps.json"
    assert call(["train", "--data", data, "--epochs", 1, "--quiet", "--timeout", 60]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("warning: ")]) == 2


@pytest.mark.exhaustive  # what workers say, and how it is reported, has tests of its own
def test_a_loss_that_is_not_finite_is_one_line(
    cora: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(["train", "--data", cora, "--lr", 1e37, "--epochs", 9, "--quiet"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: rank 0: the ")
    assert " is not finite (got " in line
    assert "lower lr (got 1e+37)" in line
