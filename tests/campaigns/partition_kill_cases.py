# SPDX-License-Identifier: Apache-2.0
"""Partitions whose process is killed or interrupted at random moments, or whose disk is full.

A case is ``graphshard partition --method multilevel`` of typed tables, in a process that was forked
so that it need not import torch. Something happens to it, once to three times; then the command is
given again until it comes to its end. It is checked that

* all files of the folder, hidden ones included, are then those of an undisturbed run, bit for bit;
* Ctrl-C ends it with "interrupted" and the exit code 130;
* on a full disk (a tmpfs of a few MB in a mount namespace of its own) it ends with one line, which
  names a file, and with the exit code 2; with room it goes on where it stood;
* where two processes share the work, the one that is left says in one line which one is gone.

``python tests/campaigns/partition_kill_cases.py --kills 100 --write`` runs the whole campaign.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from campaign_report import write_report

from graphshard.partition import PartitionRanks, _streamed, save
from graphshard.train.commands import run

FINE = "equal bytes"
ENDED = "equal bytes; it had ended before"
NOT_ALLOWED = "no mount namespace here"
EXPECTED = (FINE, ENDED, NOT_ALLOWED)
ACTIONS = ("kill", "Ctrl-C", "full disk", "kill one of two")
_CLONE_NEWNS, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x20000, 32, 0x4000, 1 << 18
_RANKS_TIMEOUT = 2.0


@dataclass(frozen=True)
class Case:
    """What happens to a partition.

    Args:
        action: Of `ACTIONS`.
        moments: When, each as a share of the time, or of the space, that an undisturbed run takes.
    """

    number: int
    action: str
    moments: tuple[float, ...]

    @classmethod
    def draw(cls, number: int, seed: int) -> Case:
        """The case of a number, of a campaign of that seed."""
        rng = random.Random(f"{seed} {number}")
        action = rng.choices(ACTIONS, (7, 1, 1, 1))[0]
        times = rng.choice((1, 1, 2, 3)) if action in ("kill", "Ctrl-C") else 1
        return cls(number, action, tuple(rng.uniform(0.02, 1.05) for _ in range(times)))


@dataclass
class Campaign:
    """Tables, and what an undisturbed run makes of them."""

    folder: Path
    expected: dict[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    space: int = 0
    kills: int = 0

    def __post_init__(self) -> None:
        write_tables(self.folder)
        take_small_levels()
        # Here, so that no process that is forked needs to import anything.
        assert run([*self._words(self.folder / "first"), "--quiet"]) == 0
        out = self.folder / "undisturbed"
        start = time.monotonic()
        code = end_of(self._start(out))
        self.seconds = time.monotonic() - start
        assert code == 0, self._said(out)
        self.expected = files_of(out)
        # At the most there are the tables' arrays, both ends of edges, and the parts.
        self.space = 2 * sum(map(len, self.expected.values()))

    def run(self, case: Case) -> str:
        """Run a case; what came of it."""
        out = self.folder / f"case-{case.number}"
        try:
            if case.action == "full disk":
                return self._fill(out, case.moments[0])
            if case.action == "kill one of two":
                wrong = self._kill_one_of_two(out, case)
            else:
                wrong = self._disturb(out, case)
            if wrong is not None and wrong != ENDED:
                return wrong
            if end_of(self._start(out)) != 0:
                return f"did not go on: {self._said(out)}"
            return (wrong or FINE) if files_of(out) == self.expected else "other bytes"
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def _disturb(self, out: Path, case: Case) -> str | None:
        number = signal.SIGKILL if case.action == "kill" else signal.SIGINT
        has_ended = True
        for moment in case.moments:
            child = self._start(out)
            time.sleep(moment * self.seconds)
            os.kill(child, number)
            code = end_of(child)
            if code == 0:
                continue
            has_ended = False
            self.kills += 1
            if number == signal.SIGINT and (code != 130 or "interrupted" not in self._said(out)):
                return f"Ctrl-C ended with {code}: {self._said(out)}"
        return ENDED if has_ended else None

    def _kill_one_of_two(self, out: Path, case: Case) -> str | None:
        target = case.number % 2
        children = [self._start(out, rank) for rank in range(2)]
        time.sleep(case.moments[0] * 1.5 * self.seconds)
        os.kill(children[target], signal.SIGKILL)
        codes = list(map(end_of, children))
        if codes[target] == 0 or codes[1 - target] == 0:  # it had done its share
            return ENDED if codes == [0, 0] else None
        self.kills += 1
        said = self._said(out, 1 - target)
        fine = re.search(rf"error: rank {target} (did not come|says nothing any more) \(", said)
        return None if fine and said.count("error:") == 1 else f"the other one said: {said}"

    def _fill(self, out: Path, share: float) -> str:
        """A disk that is too small at first, in a process of its own."""
        answer = self.folder / "answer"

        def fill() -> int:
            out.mkdir()
            if not mount_tmpfs(out, max(int(share * self.space), 1 << 16)):
                answer.write_text(NOT_ALLOWED)
                return 0
            code = end_of(self._start(out))
            said = self._said(out)
            mount_tmpfs(out, 1 << 30, _MS_REMOUNT)
            if code != 0:
                lines = [line for line in said.splitlines() if line.startswith("error: ")]
                if code != 2 or len(lines) != 1 or "No space left" not in said:
                    answer.write_text(f"a full disk ended it with {code}: {said}")
                    return 0
            kept = list(out.glob(".*-work/*/"))
            if code != 0 and end_of(self._start(out)) != 0:
                answer.write_text(f"did not go on: {self._said(out)}")
                return 0
            if code != 0 and len(kept) > 1 and "going on where" not in self._said(out):
                answer.write_text("began anew after a full disk")
                return 0
            same = files_of(out) == self.expected
            answer.write_text((FINE if code else ENDED) if same else "other bytes")
            return 0

        end_of(forked(fill))
        return answer.read_text()

    def _start(self, out: Path, rank: int | None = None) -> int:
        """Start the command in a process of its own."""
        with open(self._output(out, rank), "w") as output:

            def command() -> int:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
                if rank is not None:
                    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
                code = run(self._words(out))
                for file in (sys.stdout, sys.stderr):
                    file.flush()
                return code

            return forked(command)

    def _words(self, out: Path) -> list[str]:
        """The command."""
        words = "partition --parts 5 --method multilevel --memory 16 --name g --label user=label"
        words += f" --split 0.6,0.2,0.2 --out {out}"
        for ntype in ("user", "item"):
            words += f" --nodes {ntype}={self.folder}/{ntype}.csv"
        for name, dst in (("likes", "item"), ("knows", "user")):
            words += f" --edges user:{name}:{dst}={self.folder}/{name}.csv"
        return words.split()

    def _said(self, out: Path, rank: int | None = None) -> str:
        return self._output(out, rank).read_text()

    def _output(self, out: Path, rank: int | None) -> Path:
        return self.folder / f"{out.name}-{rank}.txt"


def take_small_levels() -> None:
    """Give METIS small levels only, so that small graphs have several; wait for no rank long."""
    make = _streamed.Streaming

    def asked(**settings: Any) -> _streamed.Streaming:
        return make(**{"coarse": (200, 4000), **settings})

    save.Streaming = asked  # type: ignore[misc, assignment]
    assert PartitionRanks.__init__.__kwdefaults__ is not None
    PartitionRanks.__init__.__kwdefaults__["timeout"] = _RANKS_TIMEOUT


def write_tables(folder: Path) -> None:
    """Tables of two types of nodes and two relations; ids are texts."""
    rng = np.random.default_rng(0)
    counts = {"user": 3000, "item": 1500}
    for ntype, count in counts.items():
        rows = [
            f"{ntype[0]}{i},{x:.3f},{'abc'[c]}"
            for i, (x, c) in enumerate(
                zip(rng.random(count), rng.integers(0, 3, count), strict=True)
            )
        ]
        (folder / f"{ntype}.csv").write_text("\n".join(["id,x,label", *rows]) + "\n")
    for name, dst in (("likes", "item"), ("knows", "user")):
        ends = rng.integers(0, (counts["user"], counts[dst]), (20_000, 2)).tolist()
        rows = [f"u{a},{dst[0]}{b},{a % 7}.5" for a, b in ends]
        (folder / f"{name}.csv").write_text("\n".join(["src,dst,weight", *rows]) + "\n")


def files_of(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by path; of folders that are empty, nothing."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def forked(function: Callable[[], int]) -> int:
    """Call a function in a process of its own, which its return value ends."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = function()
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return child


def end_of(child: int) -> int:
    """Wait for a process; its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def mount_tmpfs(folder: Path, size: int, flags: int = 0) -> bool:
    """Mount, in a namespace of this process, or change the size of, a file system in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not flags:
        if libc.unshare(_CLONE_NEWNS) != 0:
            return False
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    target, options = os.fsencode(folder), f"size={size}".encode()
    return bool(libc.mount(b"tmpfs", target, b"tmpfs", flags, options) == 0)


def run_cases(campaign: Campaign, cases: Sequence[Case]) -> list[tuple[Case, str]]:
    """Run cases one after another."""
    return [(case, campaign.run(case)) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="processes to kill or interrupt")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write a report")
    options = parser.parse_args()
    outcomes: dict[str, Counter[str]] = {action: Counter() for action in ACTIONS}
    with tempfile.TemporaryDirectory(prefix="partition-kills-") as folder:
        campaign = Campaign(Path(folder))
        number = options.first
        while campaign.kills < options.kills:
            case = Case.draw(number, options.seed)
            outcome = campaign.run(case)
            outcomes[case.action][outcome.partition(":")[0]] += 1
            print(f"{campaign.kills} kills, {outcome}: {case}", flush=True)
            number += 1
        notes = [
            f"{campaign.kills} processes were killed or interrupted in {number - options.first} "
            f"cases, at moments of a run that takes {campaign.seconds:.1f} s beside other work."
        ]
    if options.write:
        print(
            write_report(
                "partition_kills",
                "Partitions of typed tables whose process was killed, interrupted, or had a full "
                "disk, and that were started again",
                f"python {' '.join(sys.argv)}",
                {action: counts for action, counts in outcomes.items() if counts},
                notes,
            )
        )


if __name__ == "__main__":
    main()
