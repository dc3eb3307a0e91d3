# SPDX-License-Identifier: Apache-2.0
"""What campaigns share: outcomes counted, and written where results are kept. No process."""

from __future__ import annotations

import datetime
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def write_report(
    name: str,
    title: str,
    command: str,
    outcomes: Mapping[str, Counter[str]],
    notes: Sequence[str] = (),
) -> Path:
    """Write ``benchmarks/results/campaign_<name>_cpu_<date>.md`` with a row per target.

    Args:
        name: Short name of the campaign, such as ``mutations``.
        title: What was done, in one sentence.
        command: The exact command that does it again.
        outcomes: For each target, how often each outcome came.
        notes: Paragraphs that follow the table.
    """
    kinds = sorted({kind for counts in outcomes.values() for kind in counts})
    rows = [
        "| " + " | ".join(["", "tries", *kinds]) + " |",
        "| " + " | ".join(["---"] * (len(kinds) + 2)) + " |",
    ]
    for target, counts in outcomes.items():
        cells = [target, str(counts.total()), *(str(counts[kind]) for kind in kinds)]
        rows.append("| " + " | ".join(cells) + " |")
    today = datetime.date.today().isoformat()
    machine = (
        f"Command: `{command}`  \n{today}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {os.cpu_count()} cores."
    )
    path = RESULTS / f"campaign_{name}_cpu_{today}.md"
    path.write_text("\n\n".join([f"# {title}", "\n".join(rows), *notes, machine]) + "\n")
    return path
