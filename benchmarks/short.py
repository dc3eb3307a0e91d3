# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark on a small graph, in some minutes, to see that it runs and what it says.

    make bench                # makes the environments, too
    python benchmarks/short.py

Ratios on small graphs are not those on large ones: figures to report come from the scripts
themselves, with the sizes that are their defaults.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import PEER_PYTHON, peer_has

HERE = Path(__file__).resolve().parent
SIZE = ["--nodes", "20000", "--edges", "210000"]
ONCE = ["--rounds", "1"]
#: Script, its arguments, and whether it needs DGL in the peers' environment.
SHORT: dict[str, tuple[list[str], bool]] = {
    "kernels": ([*SIZE, *ONCE, "--widths", "128", "--dtypes", "float32"], False),
    "locality": ([*SIZE, *ONCE, "--widths", "64"], False),
    "memory": (["--nodes", "10000", "--degree", "20"], False),
    "attention": ([*SIZE, *ONCE, "--repeats", "1", "--layer", "gat"], True),
    "full_batch": ([*SIZE, *ONCE, "--epochs", "3", "--model", "sage"], True),
    "sampling": ([*SIZE, *ONCE, "--question", "draw"], True),
    "partition": ([*SIZE, *ONCE], True),
    "loading": ([*SIZE, *ONCE], False),
}


def main() -> int:
    """Run them all, or those that are named; returns how many failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=SHORT, action="append")
    args = parser.parse_args()
    with_dgl, failed = peer_has("dgl"), 0
    for name in args.only or SHORT:
        options, needs_dgl = SHORT[name]
        sys.stdout.write(f"\n===== {name} {' '.join(options)}\n")
        sys.stdout.flush()
        if needs_dgl and not with_dgl:
            sys.stdout.write(f"left out: no DGL 1.1.3 in {PEER_PYTHON}; `make peer` makes one\n")
            continue
        with tempfile.TemporaryDirectory() as folder:
            where = ["--folder", folder] if needs_dgl else []
            command = [sys.executable, str(HERE / f"{name}.py"), *options, *where]
            failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
