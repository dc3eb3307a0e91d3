# SPDX-License-Identifier: Apache-2.0
"""Which of DGL's example programs run under ``python -m graphshard.dgl``, and print DGL's numbers.

    git clone --branch v1.1.3 https://github.com/dmlc/dgl
    git clone https://github.com/tkipf/gcn
    python benchmarks/dgl_example_runs.py dgl/examples/pytorch gcn/gcn/data [--keep FOLDER]

Each program of `RUNS` runs unedited, twice, one run at a time, for a minute at most: under the
installed DGL and under ``python -m graphshard.dgl``, from the same seeds, on one thread. Cora and
Citeseer are the real ones, and so is what programs make themselves; other data sets are drawn, in
the files of the real ones (`_dgl_example_data.py`). Compared are the losses and scores that both
print, in order, as far as both came. Dropout of attention is drawn by edge here, and by torch in
DGL: such programs run once more with all dropout off. What other programs would need is `LACKING`.
``--only`` takes programs whose line contains a text; ``--list`` prints the table and writes
nothing; without it the table goes to ``benchmarks/results/dgl_example_runs_cpu_<date>.md``.

Needed beside DGL: scikit-learn, torchmetrics, rdflib, ogb, cloudpickle and ordered-set, for the
programs that import them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from _common import markdown_table, write_result
from _dgl_example_data import write_data, write_ogb

#: Program with its arguments, its data, and whether dropout is off.
RUNS = """
appnp/train.py --dataset cora --n-epochs 10 | Cora
arma/citation.py --dataset Cora --epochs 10 | Cora
dagnn/main.py --dataset Cora --epochs 5 --runs 1 | Cora
dgi/train.py --dataset cora --n-dgi-epochs 3 --n-classifier-epochs 10 | Cora
gat/train.py --dataset cora | Cora
gat/train.py --dataset cora | Cora | no dropout
gatv2/train.py --dataset cora --epochs 10 | Cora
gatv2/train.py --dataset cora --epochs 10 | Cora | no dropout
gcn/train.py --dataset cora | Cora
gcn/train.py --dataset citeseer | Citeseer
grace/main.py --dataname cora --epochs 3 --gpu -1 | Cora
grand/main.py --dataname cora --epochs 5 | Cora
graphsage/train_full.py --dataset cora | Cora
hardgat/train.py --dataset cora --epochs 10 | Cora | no dropout
jknet/main.py --dataset Cora --epochs 5 --run 1 | Cora
label_propagation/main.py --dataset Cora | Cora
mixhop/main.py --dataset Cora --epochs 5 | Cora
model_zoo/citation_network/run.py --model gcn --dataset cora --gpu -1 | Cora
model_zoo/citation_network/run.py --model gat --dataset cora --gpu -1 | Cora | no dropout
model_zoo/citation_network/run.py --model graphsage --dataset cora --gpu -1 | Cora
model_zoo/citation_network/run.py --model chebnet --dataset cora --gpu -1 | Cora
monet/citation.py --dataset cora --n-epochs 10 --gpu -1 | Cora
mvgrl/node/main.py --dataname cora --epochs 2 | Cora
node2vec/main.py --task time | Cora
rect/main.py --dataset cora --n-epochs 10 --gpu -1 | Cora
sgc/sgc.py --dataset cora --n-epochs 10 | Cora
sign/sign.py --dataset cora --num-epochs 10 --gpu -1 | Cora
tagcn/train.py --dataset cora --n-epochs 10 --gpu -1 | Cora
vgae/train.py --datasrc dgl --dataset cora --epochs 3 | Cora
dgmg/main.py | own
lda/lda_model.py | own
pagerank.py | own
gnn_explainer/train_main.py --dataset BAShape | generated
line_graph/train.py --n-epochs 2 --gpu -1 | generated
caregnn/main.py --dataset yelp --max_epoch 3 | drawn
caregnn/main_sampling.py --dataset yelp --max_epoch 2 --num_workers 0 | drawn
correct_and_smooth/main.py --dropout 0.5 --epochs 5 | drawn
diffpool/train.py --dataset ENZYMES --epochs 2 --cuda 0 | drawn
gat/train_ppi.py | drawn
geniepath/ppi.py --max_epoch 2 | drawn
gin/train.py --dataset MUTAG | drawn
graphsage/node_classification.py --mode cpu | drawn
rgcn/entity.py --dataset aifb | drawn
rgcn/entity_sample.py --dataset aifb | drawn
rgcn-hetero/entity_classify.py --dataset aifb --testing | drawn
rgcn-hetero/entity_classify_mb.py --dataset aifb --testing | drawn
tree_lstm/train.py --epochs 2 | drawn
infograph/unsupervised.py --dataname MUTAG --epochs 3 --log_interval 1 | drawn
sagpool/main.py --dataset DD --epochs 3 --num_trials 1 | drawn
hgp_sl/main.py --dataset PROTEINS --epochs 3 | drawn
ogb/ogbn-arxiv/gcn.py --cpu --n-runs 1 --n-epochs 10 --n-hidden 32 | drawn
ogb/ogbn-arxiv/gat.py --cpu --n-runs 1 --n-epochs 3 --n-hidden 16 | drawn
ogb/cluster-gat/main.py --gpu -1 --num_epochs 2 --num_workers 0 | drawn
ogb/ogbn-products/graphsage/main.py --gpu -1 --num-epochs 2 --num-workers 0 | drawn
vrgcn/train_cv.py --num-epochs 2 --gpu -1 | drawn
sgc/sgc_reddit.py --dataset reddit | drawn
graphsaint/train_sampling.py --task ppi_n --gpu -1 | drawn
compGCN/main.py --epoch 2 --num_workers 0 --gpu -1 | drawn
bgrl/main.py --dataset amazon_computers --epochs 4 --eval_epochs 2 --lr_warmup_epochs 1 | drawn
gxn/main.py --dataset MUTAG --device cpu --epochs 3 | drawn
mvgrl/graph/main.py --dataname MUTAG --epochs 2 | drawn
rgcn/link.py | drawn
""".strip().splitlines()

#: Why programs under a folder cannot run here: the first that fits counts.
LACKING = {
    "a GPU": "multigpu rgcn/entity_sample_multi_gpu.py vrgcn/train_cv_multi_gpu.py labor "
    "GATNE-T/src/main_sparse_multi_gpus.py hgt graphsage/lightning graphsage/advanced "
    "ogb_lsc ogb/line ogb/deepwalk",
    "machines (DistDGL): tests/sampling/test_dgl_script.py runs such a one": "graphsage/dist "
    "rgcn/experimental",
    "a package (rdkit, torchvision, torchtext, faiss, tensorflow, catboost, gensim, OpenCV)": ""
    "jtnn capsule hilander dimenet bgnn pointcloud graphwriter transformer eges graphsim",
    "a download of its own": "GATNE-T GNN-FiLM NGCF P-GNN TAHIN caregnn dtgrnn eeg-gcnn evolveGCN "
    "gas gcmc ggnn graph_matching han metapath2vec pinsage rrn seal stgcn_wave tgn deepwalk",
    "OGB's or DGL's files, which are not drawn here": "deepergcn ogb rgat graphsage "
    "infograph/semisupervised.py geniepath/pubmed.py",
    "another program's model": "gnn_explainer/explain_main.py",
}

#: Why numbers differ; what a program draws with the library's own generator cannot be the same.
BECAUSE = {
    "gat/train.py": "attention dropout",
    "gatv2/train.py": "attention dropout",
    "gat/train_ppi.py": "sums in another order, which training lets grow",
    "rgcn/entity_sample.py": "the neighbours drawn",
}

#: Differences up to this come from sums in another order, which training lets grow.
ROUNDING = 1e-4

_NUMBER = re.compile(
    r"(?P<what>loss|acc\w*|auc\w*|f1\w*|mrr|hits?\S*|score|micro\w*|macro\w*|rmse|recall|nll|ap)"
    r"(?P<between>[^0-9\n-]{0,16}?)(?P<value>-?\d+\.\d+(?:e[-+]?\d+)?|nan|inf)\b",
    re.IGNORECASE,
)
_SEEDS = """\
import random
import numpy
import torch
random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)
"""
_NO_DROPOUT = """\
torch.nn.Dropout.forward = lambda module, x: x
torch.nn.Dropout.__init__ = lambda module, p=0.5, inplace=False: (
    torch.nn.Module.__init__(module), setattr(module, "p", 0.0), setattr(module, "inplace", False)
) and None
"""


@dataclass(frozen=True)
class Place:
    """Where a program runs: its environment, and for how many seconds at most."""

    environment: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Args:
        status: None where it ran for its whole time, else the exit status.
        values: What was printed of losses and scores, name and value in turn.
        reason: Why it came to no numbers, if it did not.
        output: All that was printed.
    """

    status: int | None
    values: list[tuple[str, float]]
    reason: str
    output: str

    @property
    def runs(self) -> bool:
        """Whether it came to its end, or was still at work."""
        return not self.status and (self.status == 0 or bool(self.values))


def run(program: Path, arguments: list[str], ours: bool, place: Place) -> Outcome:
    """Run a program of a copied folder, or read what it printed at its last run."""
    module = ["-m", "graphshard.dgl"] if ours else []
    command = [sys.executable, "-u", "-W", "ignore", *module, program.name, *arguments]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            cwd=program.parent,
            env=place.environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(place.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        printed.seek(0)
        return outcome(status, printed.read().decode(errors="replace"))


def outcome(status: int | None, output: str) -> Outcome:
    """What a run came to, from its exit status and all that it printed."""
    values = [(match["what"].lower(), float(match["value"])) for match in _NUMBER.finditer(output)]
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = lines[-1][:160] if lines else "nothing was printed"
    if status is None:
        reason = "no number in its time"
    return Outcome(status, values, reason, output)


def compared(theirs: Outcome, ours: Outcome) -> str:
    """How the numbers of two runs agree."""
    pairs = list(zip(theirs.values, ours.values, strict=False))
    if not pairs:
        return "no numbers"
    finished = theirs.status == 0 == ours.status and len(theirs.values) != len(ours.values)
    if finished or any(a[0] != b[0] for a, b in pairs):
        return "other lines"
    gaps = [
        abs(a[1] - b[1]) / max(1.0, abs(a[1])) for a, b in pairs if a[1] == a[1] or b[1] == b[1]
    ]
    gap = max(gaps, default=0.0)
    if gap == 0:
        return f"equal ({len(pairs)})"
    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
    return f"differs by {gap:.1g} ({len(pairs)}, the first {first} equal)"


def gap_of(agreement: str) -> float:
    """The largest relative difference that `compared` states."""
    return float(agreement.split()[2])


def why_not(program: str) -> str:
    """What a program needs that is not here."""
    for reason, places in LACKING.items():
        if any(program == place or program.startswith(f"{place}/") for place in places.split()):
            return reason
    return "not tried"


def main() -> None:
    """Run the programs, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", type=Path, help="the folder examples/pytorch of DGL")
    parser.add_argument("planetoid", type=Path, help="the folder of the files ind.cora.x and so on")
    parser.add_argument("--only", default="", help="part of the programs' lines")
    parser.add_argument("--list", action="store_true", help="print the table, write nothing")
    parser.add_argument("--seconds", type=float, default=60, help="how long a program may run")
    parser.add_argument(
        "--keep", type=Path, help="folder for what programs print; those in it do not run again"
    )
    parser.add_argument("--kept", action="store_true", help="run nothing: a table of what is kept")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for folder, text in (("seeds", _SEEDS), ("no dropout", _SEEDS + _NO_DROPOUT)):
            (root / folder).mkdir()
            (root / folder / "sitecustomize.py").write_text(text, encoding="utf-8")
        write_data(root / "data", options.planetoid)
        for line in RUNS:
            if options.only in line:
                command, kind, *dropout = line.split(" | ")
                folder = dropout[0] if dropout else "seeds"
                if options.kept and not all(
                    (options.keep / _title(command, folder, ours)).exists()
                    for ours in (False, True)
                ):
                    continue
                theirs, ours = (
                    _kept(command, ours, root, folder, options) for ours in (False, True)
                )
                kind = f"{kind}, {dropout[0]}" if dropout else kind
                rows.append((command, kind, *_judged(command.split()[0], theirs, ours)))
                print(*rows[-1], sep=" | ", flush=True)
    _report(options, rows)


def _title(command: str, folder: str, ours: bool) -> str:
    """The file that keeps what a program printed."""
    title = command if folder == "seeds" else f"{command} {folder}"
    return f"{title.replace('/', '_').replace(' ', '_')}.{int(ours)}"


def _kept(
    command: str, ours: bool, root: Path, folder: str, options: argparse.Namespace
) -> Outcome:
    """The outcome of a program, which runs unless it has run before."""
    name = _title(command, folder, ours)
    if options.keep and (options.keep / name).exists():
        status, output = (options.keep / name).read_text(encoding="utf-8").split("\n", 1)
        return outcome(None if status == "None" else int(status), output)
    program, *arguments = shlex.split(command)
    side, top = root / "side", Path(program).parts[0]
    if top == program:
        side.mkdir()
        shutil.copy(options.examples / program, side)
    else:
        shutil.copytree(options.examples / top, side / top)
    shutil.copytree(root / "data", root / "downloads")
    write_ogb((side / program).parent / "dataset")
    path = [str(root / folder), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "DGL_DOWNLOAD_DIR": str(root / "downloads"),
        "DGLBACKEND": "pytorch",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    result = run(side / program, arguments, ours, Place(environment, options.seconds))
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        text = f"{result.status}\n{result.output}"
        (options.keep / name).write_text(text, encoding="utf-8")
    shutil.rmtree(side)
    shutil.rmtree(root / "downloads")
    return result


def _judged(program: str, theirs: Outcome, ours: Outcome) -> tuple[str, str]:
    """The verdict on a program, and what is to be said of it."""
    if not ours.runs and not theirs.runs and ours.status is theirs.status is None:
        return "out of time", "neither came to a number"
    if not ours.runs and not theirs.runs:
        return "neither runs", f"DGL: {theirs.reason}; here: {ours.reason}"
    if not ours.runs:
        return "DGL alone", ours.reason
    if not theirs.runs:
        return "here alone", theirs.reason
    agreement = compared(theirs, ours)
    verdict = "equal" if agreement.startswith("equal") else "differs"
    if agreement == "no numbers":
        verdict = "both run"
    if agreement.startswith("differs") and gap_of(agreement) <= ROUNDING:
        verdict = "equal to rounding"
    if verdict == "differs" and program in BECAUSE:
        agreement = f"{agreement}; {BECAUSE[program]}"
    return verdict, agreement


def _report(options: argparse.Namespace, rows: list[tuple[str, str, str, str]]) -> None:
    counts = Counter(row[2] for row in rows)
    tried = {row[0].split()[0] for row in rows}
    mains = {
        str(path.relative_to(options.examples))
        for path in options.examples.rglob("*.py")
        if re.search(r"__main__|^(?:main\(|parser)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    listed = {line.split()[0] for line in RUNS}
    rest = Counter(why_not(program) for program in mains - listed)
    body = [
        f"{len(rows)} runs of {len(tried)} programs: "
        + ", ".join(f"{name} {count}" for name, count in counts.most_common())
        + ". Data `drawn` is small and drawn at random in the files of the real set, `own` and "
        "`generated` is what the program or the library makes. In brackets: how many losses and "
        "scores were compared, as printed.",
        "",
        *markdown_table(
            ["program", "data", "result", "numbers, or the reason"],
            [(f"`{command}`", *others) for command, *others in rows],
        ),
        "",
        f"{len(listed - tried)} more programs of the list were not run this time. The other "
        f"{len(mains - listed)} main programs cannot run here. They need:",
        "",
        *markdown_table(["what", "programs"], rest.most_common()),
    ]
    if options.list:
        print("\n".join(body))
    else:
        title = "DGL's example programs: do they run, and print DGL's numbers?"
        write_result("dgl_example_runs", title, body)


if __name__ == "__main__":
    main()
