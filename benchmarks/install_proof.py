# SPDX-License-Identifier: Apache-2.0
"""Does it install? Wheel and sdist, with and without a compiler, on several Pythons and torches.

For each pair of a Python and a release of torch there is a fresh environment, in which each way to
install is tried in turn: it must install, train the GCN of ``make demo`` with two workers, and pass
tests from a folder where the source is not: all of the core's for the ways named with ``--whole``,
``tests/graph`` for the others. Where the sdist installs what is in the wheel, byte for byte, that
is said: then the wheel's tests are those of both. Run it from a clean checkout; rows of several
calls on one day come to stand in one table, and what is written by hand below it stays there:

    python benchmarks/install_proof.py --pair python3.10 2.6.0 --whole wheel 2> proof.log
    python benchmarks/install_proof.py --pair python3.13 newest --pair python3.12 newest

A test that fails is printed to the standard error. A CUDA build of torch, which is what PyPI has
for Linux, takes 6 GB for the time of its pair. torch is installed by uv, graphshard and what else
it needs by pip.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("wheel", "sdist", "sdist, no compiler")
CORE_TESTS = [
    f"tests/{name}" for name in ("comm", "ops", "graph", "fullbatch", "partition", "sampling")
]
FEW_TESTS = ["tests/graph"]
# What wheel and sdist are made of.
SOURCES = ("src", "csrc", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")


@dataclasses.dataclass
class Row:
    """What was seen of one way to install."""

    python: str = ""
    torch: str = ""
    way: str = ""
    installed: str = ""
    kernels: str = ""
    files: str = ""
    demo: str = ""
    tests: str = ""


class Failed(Exception):
    """A command ended with an error; has what it printed."""


def call(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command to its end; returns what it printed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_CON"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, "PIP_CONFIG_FILE": os.devnull, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=3600,
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command[:6]))}: {done.stdout}")
    return done.stdout


def built(python: Path, version: str) -> dict[str, Path]:
    """The wheel for a Python, and the sdist, of HEAD; made once for what they are made of."""
    tree = call("git", "ls-tree", "HEAD", *SOURCES, cwd=ROOT)
    digest = hashlib.sha256(tree.encode()).hexdigest()[:12]
    folder = ROOT / "build" / "install_proof" / f"{version}-{digest}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as name:
            source, made = Path(name) / "source", Path(name) / "made"
            source.mkdir()
            call("git", "archive", "-o", Path(name) / "source.tar", "HEAD", cwd=ROOT)
            call("tar", "-xf", Path(name) / "source.tar", "-C", source, cwd=source)
            needed = {"GRAPHSHARD_REQUIRE_EXTENSION": "1"}
            call(python, "-m", "build", "-q", "-o", made, source, cwd=source, **needed)
            shutil.copytree(made, folder)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist, "sdist, no compiler": sdist}


def tried(
    pair: tuple[str, str], ways: list[str], whole: list[str], processes: int
) -> Iterator[Row]:
    """Try the ways to install with one Python and one torch; all core tests for those in whole."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "venv" / "bin" / "python"
        call(pair[0], "-m", "venv", folder / "venv", cwd=folder)
        wanted = "torch" if pair[1] == "newest" else f"torch=={pair[1]}"
        call(python, "-m", "pip", "install", "-q", "uv", "build", cwd=folder)
        uv = (python, "-m", "uv", "pip", "install", "-q", "--python", python)
        call(*uv, wanted, cwd=folder)  # links what its cache has: torch is gigabytes
        version = call(
            python, "-c", "import platform; print(platform.python_version())", cwd=folder
        )
        torch = call(python, "-c", "import torch; print(torch.__version__)", cwd=folder)
        files = built(python, version.strip())
        checkout = folder / "tests of the checkout"
        checkout.mkdir()
        call("git", "archive", "-o", folder / "t.tar", "HEAD", "tests", "pyproject.toml", cwd=ROOT)
        call("tar", "-xf", folder / "t.tar", "-C", checkout, cwd=folder)
        for way in ways:
            row = Row(version.strip(), torch.strip().splitlines()[-1], way)
            tests = CORE_TESTS if way in whole else FEW_TESTS
            _try(row, python, files, checkout, tests, processes)
            yield row


def _try(
    row: Row,
    python: Path,
    files: dict[str, Path],
    checkout: Path,
    tests: list[str],
    processes: int,
) -> None:
    """Install, look for the kernels, run the demo and the tests; fills the row."""
    compiler = {"CC": "/bin/false", "CXX": "/bin/false"} if "no compiler" in row.way else {}
    pip = (python, "-m", "pip")
    try:
        start = time.perf_counter()
        call(*pip, "uninstall", "-q", "-y", "graphshard", cwd=checkout)
        what = f"graphshard[core-test] @ {files[row.way].as_uri()}"
        call(*pip, "install", "-q", "--no-cache-dir", what, cwd=checkout, **compiler)
        row.installed = f"{time.perf_counter() - start:.0f} s"
        code = "import importlib.util as u; print(u.find_spec('graphshard._kernels') is not None)"
        has_kernels = call(python, "-c", code, cwd=checkout).strip() == "True"
        row.kernels = "compiled" if has_kernels else "plain torch"
        code = "import sysconfig as s; print(s.get_path('platlib'))"
        installed = Path(call(python, "-c", code, cwd=checkout).strip()) / "graphshard"
        row.files = _compared(installed, files["wheel"])
        command, parts = python.with_name("graphshard"), checkout / "parts"
        shutil.rmtree(parts, ignore_errors=True)
        call(command, "partition", "--data", "cora", "--parts", 2, "--out", parts, cwd=checkout)
        words = ("--data", parts / "cora.json", "--model", "gcn", "--workers", 2, "--mode", "full")
        shown = call(command, "train", *words, "--device", "cpu", cwd=checkout)
        accuracy = re.search(r"test accuracy[^\n]*?([0-9.]+) %", shown)
        row.demo = f"test {accuracy[1]} %" if accuracy else "no accuracy shown"
        row.tests = _tested(python, checkout, tests, processes, has_kernels)
    except Failed as error:
        lacking = next(
            f.name for f in dataclasses.fields(row) if not getattr(row, f.name) or f.name == "tests"
        )
        setattr(row, lacking, "**failed**")
        print(f"{row.python}, torch {row.torch}, {row.way}: {error}", file=sys.stderr, flush=True)


def _compared(installed: Path, wheel: Path) -> str:
    """How many files are installed, and which are not the wheel's, byte for byte."""
    found = {
        f"graphshard/{path.relative_to(installed).as_posix()}": path.read_bytes()
        for path in installed.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name: archive.read(name)
            for name in archive.namelist()
            if name.startswith("graphshard/") and not name.endswith("/")
        }
    differ = sorted(n for n in found | packed if found.get(n) != packed.get(n))
    if not differ:
        return f"{len(found)}, all the wheel's"
    return f"{len(found)}, the wheel's but for {', '.join(Path(name).name for name in differ[:4])}"


def _tested(
    python: Path, checkout: Path, tests: list[str], processes: int, has_kernels: bool
) -> str:
    """How the tests ended; those that failed are run once more by themselves, and that is said."""
    suite = "core" if tests == CORE_TESTS else " ".join(tests)
    options = {} if has_kernels else {"GRAPHSHARD_NO_EXTENSION": "1"}
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    try:
        spread = ("-n", processes, "--dist", "loadfile", "--no-loadscope-reorder")
        shown = call(*pytest, *spread, *tests, cwd=checkout, **options)
        return f"{suite}: {_last(shown)}"
    except Failed as error:
        print(error, file=sys.stderr, flush=True)
        first = _last(str(error))
        again = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", str(error), re.M)
        if not again:
            return f"{suite}: **{first}**"
    try:
        alone = _last(call(*pytest, "-n", 0, *again, cwd=checkout, **options))
        return f"{suite}: {first}; what failed, by itself: {alone}"
    except Failed as error:
        print(error, file=sys.stderr, flush=True)
        return f"{suite}: **{first}; what failed, by itself: {_last(str(error))}**"


def _last(shown: str) -> str:
    """The line that says how tests ended; libraries may print more behind it."""
    lines = shown.strip().splitlines()
    ended = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return (ended or lines)[-1]


def rows_of(table: Path) -> tuple[list[Row], list[str], str]:
    """The rows of a table that an earlier call wrote, the commands that made them, and the rest."""
    if not table.exists():
        return [], [], ""
    text = table.read_text(encoding="utf-8")
    lines = text.splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    commands = [line for line in lines if line.startswith("    python ")]
    rest = re.split(r"^[^\n]* cores\.\n", text, maxsplit=1, flags=re.M)[1]
    names = cells[0] if cells else []
    rows = [Row(**dict(zip(names, row, strict=True))) for row in cells[1:] if row[0] != "---"]
    return rows, commands, rest


def written(table: Path, rows: list[Row], commands: list[str], rest: str, today: str) -> None:
    """Write the table of what was seen, with the rest of the file as it was."""
    names = [field.name for field in dataclasses.fields(Row)]
    rows = sorted(rows, key=lambda r: ([int(n) for n in r.python.split(".")], r.torch, r.way))
    lines = [
        "# What installs where, and does it work there",
        "",
        "Each pair of a Python and a torch in a fresh environment without DGL and PyG. The demo is "
        "`make demo`'s GCN with two workers; *core* is "
        f"{' '.join(CORE_TESTS)}. *No compiler*: `CC` and `CXX` are `/bin/false`. Seconds were "
        "taken beside other work, and say nothing of speed. *Files*: how many are installed, and "
        "whether they are those of the wheel, byte for byte.",
        "",
        f"| {' | '.join(names)} |",
        f"|{' --- |' * len(names)}",
        *(f"| {' | '.join(dataclasses.astuple(each))} |" for each in rows),
        "",
        "Commands:",
        "",
        *dict.fromkeys(commands),
        "",
        f"{today}, {os.uname().sysname} {os.uname().machine}, {os.cpu_count()} cores.",
    ]
    table.write_text("\n".join(lines) + "\n" + rest, encoding="utf-8")


def main() -> None:
    """Try all pairs; each row is in the file as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--pair", nargs=2, action="append", required=True, metavar=("PYTHON", "TORCH")
    )
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument(
        "--whole", nargs="*", default=[], choices=WAYS, help="run all core tests after these"
    )
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    today = datetime.date.today().isoformat()
    out = options.out or ROOT / "benchmarks" / "results" / f"install_{today}.md"
    words = [f'"{word}"' if " " in word else word for word in sys.argv[1:]]
    command = f"    python benchmarks/install_proof.py {' '.join(words)}"
    for pair in options.pair:
        for row in tried(tuple(pair), options.ways, options.whole, options.processes):
            print(row, flush=True)
            seen = (row.python, row.torch, row.way)
            rows, commands, rest = rows_of(out)
            rows = [each for each in rows if (each.python, each.torch, each.way) != seen]
            written(out, [*rows, row], [*commands, command], rest, today)


if __name__ == "__main__":
    main()
