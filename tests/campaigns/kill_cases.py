# SPDX-License-Identifier: Apache-2.0
"""Training jobs whose processes are killed, stopped, suspended or silent at random moments.

A case is one job, started as a user starts it, in which something happens to one process at a
moment between start and shutdown: it gets a signal, is suspended for a while, or holds its
interpreter, so that none of its threads says a word. Or strangers connect to every port of the job
and say a byte now and then. After what ends a job it is checked that

* every other process of the job is gone within timeout + ``MARGIN_SECONDS`` (see
  ``[Note: how soon a job ends]`` in comm/group.py), and nothing is left behind;
* the error names the rank;
* the run, resumed from its checkpoints, gives the result of an undisturbed one, bit for bit.

What is shorter than the timeout, and strangers, must not be noticed: the job has that result.

``python tests/campaigns/kill_cases.py --count 300 --write`` runs the whole campaign.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from campaign_report import write_report

from graphshard.comm.group import MARGIN_SECONDS
from graphshard.data import load_dataset
from graphshard.data.task import partition_dataset
from graphshard.testing import RanksFailed, run_ranks
from graphshard.train import FullBatchConfig, FullBatchRun, SampledConfig, SampledRun

TIMEOUT = 12.0
EPOCHS = 8
MARKER = "GRAPHSHARD_CAMPAIGN_CASE"
FINE = "as it should"
ENDED = "had ended before"
# If the others have ended in good order it does so for ever.
WAITS = "torchrun waited for a stopped worker after the result"
RESULT = "bytes sent per epoch"
EXPECTED = (FINE, ENDED, WAITS)
_SHARED_MEMORY = Path("/dev/shm")
_GIVE_UP_SECONDS = 120.0
_TORCHRUN_SECONDS = 35.0
# torchrun's own folders, which it leaves behind when it is killed.
# And a folder with a remote module, which torch makes where its distributed part is imported.
_FOREIGN = ("torchelastic_", "torchinductor_")

KINDS: dict[str, dict[str, Any]] = {
    "oneshot": {"model": "gcn", "aggregation": "oneshot"},
    "sequential": {"model": "gat", "hidden": 4, "heads": 2, "aggregation": "sequential"},
    "sampled": {"model": "sage", "fanouts": (3, 3), "batch_size": 32},
}
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "hang up": signal.SIGHUP,
    "pause": signal.SIGSTOP,
}
HARMLESS = ("pause", "short silence", "strangers")
SILENCES = {"short silence": TIMEOUT / 4, "long silence": TIMEOUT + 2 * MARGIN_SECONDS}
NUM_STRANGERS = 30
# Imported by every Python of a job: a thread of it holds the interpreter once a file says so.
HOLDER = """
import ctypes, os, threading, time
def hold():
    path = f"{os.environ['GRAPHSHARD_CAMPAIGN_HOLD']}/{os.getpid()}"
    while not os.path.exists(path):
        time.sleep(0.02)
    with open(path) as file:
        seconds = float(file.read())
    os.remove(path)
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
def start():
    threading.Thread(target=hold, daemon=True).start()
os.register_at_fork(after_in_child=start)
start()
"""


@dataclass(frozen=True)
class Case:
    """One job and what happens to it.

    Args:
        number: Of the case.
        starter: "graphshard" or "torchrun".
        kind: Of `KINDS`.
        ranks: Number of ranks.
        action: Of `SIGNALS`, where "pause" lets the process go on after a few seconds; of
            `SILENCES`; or "strangers".
        target: A rank; -1: the launcher.
        after: The signal comes after this many epochs.
        delay: And after this share of the time that the start, or an epoch, takes.
    """

    number: int
    starter: str
    kind: str
    ranks: int
    action: str
    target: int
    after: int
    delay: float

    @classmethod
    def draw(cls, number: int, seed: int) -> Case:
        """The case of a number, of a campaign of that seed."""
        rng = random.Random(f"{seed} {number}")
        ranks = rng.choice((2, 3))
        starter = rng.choice(("graphshard", "graphshard", "torchrun"))
        target = rng.randrange(-1, ranks) if rng.random() < 0.5 else rng.randrange(ranks)
        actions = ("kill", "stop", "terminate", *HARMLESS, "long silence")
        if target < 0:
            harmless = HARMLESS if starter == "graphshard" else ()
            actions = ("kill", "terminate", "hang up", *harmless) if harmless else ("kill",)
        # A third each: while it starts, while it trains, and at its end.
        after = rng.choice((0, rng.randrange(1, EPOCHS), EPOCHS))
        kind = rng.choice(tuple(KINDS))
        return cls(number, starter, kind, ranks, rng.choice(actions), target, after, rng.random())

    @property
    def row(self) -> str:
        """Where the report counts it."""
        return f"{self.starter}, {self.kind}: {self.action}"


@dataclass
class Finding:
    """What came of a case.

    Args:
        case: The case.
        outcome: One of `EXPECTED`, or what was wrong.
        seconds: From the signal until all other processes were gone.
        text: What the job printed.
    """

    case: Case
    outcome: str
    seconds: float
    text: str


class Campaign:
    """Partitions, undisturbed results and running times that cases share.

    Args:
        folder: Where everything is written.
        seed: Of all that is drawn.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.seed = seed
        self._lock = threading.Lock()
        self._undisturbed: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._data: dict[int, str] = {}
        self.start_seconds = 12.0

    def data(self, ranks: int) -> str:
        """Cora in so many parts."""
        with self._lock:
            if ranks not in self._data:
                cora = load_dataset("cora", row_normalize=True, add_self_loop=True)
                path = partition_dataset(cora, ranks, self.folder / f"cora-{ranks}")
                self._data[ranks] = str(path)
            return self._data[ranks]

    def config(self, case: Case, folder: Path, resume: bool) -> FullBatchConfig | SampledConfig:
        """The run of a case, with a checkpoint after every epoch."""
        kind = FullBatchConfig if case.kind != "sampled" else SampledConfig
        return kind(
            data=self.data(case.ranks),
            **KINDS[case.kind],
            epochs=EPOCHS,
            timeout=TIMEOUT,
            save_every=1,
            checkpoint_dir=str(folder / "checkpoints"),
            resume=resume,
        )

    def undisturbed(self, case: Case) -> list[dict[str, Any]]:
        """What each rank of an undisturbed run has at its end."""
        with self._lock:
            known = self._undisturbed.get((case.kind, case.ranks))
        if known is not None:
            return known
        config = self.config(case, self.folder, False)
        plain = dataclasses.replace(config, save_every=0, checkpoint_dir=None)
        found = run_ranks(train_on_rank, case.ranks, case.kind, dataclasses.asdict(plain))
        with self._lock:
            self._undisturbed[case.kind, case.ranks] = found
        return found

    def run(self, case: Case) -> Finding:
        """Run a case and check what came of it."""
        folder = self.folder / f"case-{case.number}"
        (folder / "tmp").mkdir(parents=True)
        try:
            finding = self._disturb(case, folder)
            if finding.outcome == FINE:
                wrong = self._resume(case, folder)
                finding.outcome = wrong or FINE
            return finding
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _disturb(self, case: Case, folder: Path) -> Finding:
        mark = secrets.token_hex(8)
        before = shared_files()
        job = Job(case, self.config(case, folder, False), folder, mark)
        try:
            is_there = job.wait_for_moment(self.start_seconds)
            if case.after > 0:
                self.start_seconds = 1.5 * job.seconds  # on a machine as busy as it is now
            target = job.find_target() if is_there else None
            if target is None or not job.disturb(target):
                job.wait_until_gone(self.start_seconds + TIMEOUT + _GIVE_UP_SECONDS)
                return Finding(case, ENDED, 0.0, job.printed())
            at = time.monotonic()
            bound = TIMEOUT + MARGIN_SECONDS + job.seconds_to_start(self.start_seconds)
            wrong = job.check_end(target, at, bound)
            seconds = time.monotonic() - at
        finally:
            job.end()
        text = job.printed()
        wrong = wrong or job.check_words(text) or left_behind(folder, mark, before)
        return Finding(case, wrong or FINE, seconds, text)

    def _resume(self, case: Case, folder: Path) -> str | None:
        """Resume the run; what was wrong with it."""
        if not (folder / "checkpoints").is_dir():
            return None  # it had not come so far
        values = dataclasses.asdict(self.config(case, folder, True))
        try:
            resumed = run_ranks(train_on_rank, case.ranks, case.kind, values)
        except RanksFailed as error:
            return f"could not be resumed: {error}"
        for found, expected in zip(resumed, self.undisturbed(case), strict=True):
            same = all(found[key] == expected[key] for key in ("losses", "best", "last"))
            for name, value in expected["state"].items():
                same = same and torch.equal(found["state"][name], value)
            if not same:
                return "resumed to another result"
        return None


class Job:
    """The processes of one case."""

    def __init__(
        self, case: Case, config: FullBatchConfig | SampledConfig, folder: Path, mark: str
    ) -> None:
        self.case = case
        self._mark = mark
        self._output = folder / "output"
        self._holds = folder / "holds"
        self._holds.mkdir()
        (self._holds / "sitecustomize.py").write_text(HOLDER)
        self._strangers: Strangers | None = None
        self._started = time.monotonic()
        self._is_training = False
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), MARKER: mark}
        environment["GRAPHSHARD_CAMPAIGN_HOLD"] = str(self._holds)
        path = [str(self._holds), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        environment.pop("RANK", None)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command(case, config),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for_moment(self, start_seconds: float) -> bool:
        """Wait until the signal is to come; False if the job ends before."""
        case = self.case
        if case.after == 0:
            stop = self._started + case.delay * start_seconds
        else:
            word = f"epoch {case.after}/{EPOCHS} "
            while word not in self.printed():
                if self._process.poll() is not None:
                    return False
                if time.monotonic() > self._started + _GIVE_UP_SECONDS:
                    raise TimeoutError(f"no epoch {case.after} in {case}:\n{self.printed()}")
                time.sleep(0.01)
            stop = time.monotonic() + case.delay * 0.5
        while time.monotonic() < stop and self._process.poll() is None:
            time.sleep(0.01)
        self._is_training = "epoch 1/" in self.printed()
        return self._process.poll() is None

    def seconds_to_start(self, start_seconds: float) -> float:
        """Until the other ranks wait for this one at all, where they may not have come so far."""
        stays = self.case.action in ("stop", "long silence")
        return start_seconds if stays and not self._is_training else 0.0

    def disturb(self, target: int) -> bool:
        """Do to a process what the case is about; False if it has ended."""
        action = self.case.action
        if action == "strangers":
            strangers = self._strangers = Strangers(self._mark)
            return self._comes_true(target, lambda: bool(strangers.num_by_port))
        if action in SILENCES:
            asked = self._holds / str(target)
            (self._holds / "new").write_text(str(SILENCES[action]))
            (self._holds / "new").rename(asked)
            return self._comes_true(target, lambda: not asked.exists())
        if not send(target, SIGNALS[action]):
            return False
        if action == "pause":
            time.sleep(TIMEOUT / 4)
            send(target, signal.SIGCONT)
        return True

    def _comes_true(self, target: int, condition: Callable[[], bool]) -> bool:
        """Wait for something; False if the job, or the process, ends before."""
        stop = time.monotonic() + _GIVE_UP_SECONDS
        while not condition():
            if self._process.poll() is not None or not send(target, 0):
                return False
            if time.monotonic() > stop:
                raise TimeoutError(f"{self.case.action} did not begin in {self.case}")
            time.sleep(0.02)
        return True

    def find_target(self) -> int | None:
        """The process that gets the signal; waits until there is one, None if it has ended."""
        if self.case.target < 0:
            return self._process.pid
        while self._process.poll() is None:
            for pid, environment in processes(self._mark):
                is_rank = environment.get("RANK") == str(self.case.target)
                if is_rank and parent_of(pid) == self._process.pid:
                    return pid
            if self._is_training:
                return None
            time.sleep(0.01)
        return None

    def _others(self, target: int) -> list[int]:
        """What still runs, apart from the target and, if it is torchrun, the launcher."""
        torchrun = self._process.pid if self.case.starter == "torchrun" else target
        self._process.poll()
        return [pid for pid, _ in processes(self._mark) if pid not in (target, torchrun)]

    def check_end(self, target: int, at: float, bound: float) -> str | None:
        """Wait until everything is gone; what was wrong with it."""
        if self.case.action in HARMLESS:
            bound += _GIVE_UP_SECONDS  # it runs to its end
        while self._others(target) and time.monotonic() < at + bound:
            time.sleep(0.02)
        if self._others(target):
            return f"a process still ran after {bound:.0f} s"
        if self.case.starter == "torchrun":
            bound += _TORCHRUN_SECONDS
        while processes(self._mark) and time.monotonic() < at + bound:
            self._process.poll()
            time.sleep(0.02)
        if not processes(self._mark):
            return None
        if self.case.starter == "torchrun" and RESULT in self.printed():
            return WAITS
        return f"the launcher, or the target, still ran after {bound:.0f} s"

    def check_words(self, text: str) -> str | None:
        """What is wrong with what the job said, and with its exit code."""
        case, code = self.case, self._process.poll()
        has_result = RESULT in text
        if case.action in HARMLESS:
            return None if code == 0 and has_result else f"{case.action} ended it with {code}"
        if case.target < 0:
            if case.action == "kill":
                return None
            words = "interrupted" in text and code == 130
            early = code == -SIGNALS[case.action] and not text  # Python was still starting
            fine = words or early or (has_result and code == 0)
            return None if fine else f"ended with {code}"
        if code == 0:  # the signal came when it was done
            return None if has_result else "ended with 0 and has no result"
        if "terminate called without an active exception" in text:
            return "SIGABRT at the end"
        named = re.search(rf"ranks? *:? *\[?{case.target}\b", text)
        return None if named else f"did not name rank {case.target}"

    def wait_until_gone(self, seconds: float) -> None:
        stop = time.monotonic() + seconds
        while processes(self._mark) and time.monotonic() < stop:
            self._process.poll()
            time.sleep(0.02)

    def end(self) -> None:
        """End what is left."""
        for pid, _ in processes(self._mark):
            send(pid, signal.SIGKILL)
        self._process.wait()
        self.wait_until_gone(10.0)
        if self._strangers is not None:
            self._strangers.leave()


class Strangers(threading.Thread):
    """Connections to every port on which a job listens; each says a byte now and then.

    Args:
        mark: Of the job.
    """

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self._mark = mark
        self._over = threading.Event()
        self.num_by_port: Counter[tuple[str, int]] = Counter()
        self.start()

    def run(self) -> None:
        connections: list[socket.socket] = []
        while not self._over.wait(0.2):
            for place in listening(pid for pid, _ in processes(self._mark)):
                if self.num_by_port[place] < NUM_STRANGERS:
                    with contextlib.suppress(OSError):
                        connections.append(socket.create_connection(place, 1.0))
                        self.num_by_port[place] += 1
            for connection in [*connections]:
                try:
                    connection.send(b"g")
                except OSError:  # the job has had enough of it
                    connections.remove(connection)
                    connection.close()
        for connection in connections:
            connection.close()

    def leave(self) -> None:
        """End all connections."""
        self._over.set()
        self.join(30.0)


def command(case: Case, config: FullBatchConfig | SampledConfig) -> list[str]:
    """As a user types it."""
    words = ["train", "--mode", config.mode]
    names = {*KINDS[case.kind], "data", "epochs", "timeout", "save_every", "checkpoint_dir"}
    for name in sorted(names):
        value = getattr(config, name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    if case.starter == "graphshard":
        return [sys.executable, "-m", "graphshard", *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(case.ranks), "-m", "graphshard", *words]


def train_on_rank(rank: int, world_size: int, kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Train; the result and the whole state of this rank."""
    run: FullBatchRun | SampledRun
    if kind == "sampled":
        run = SampledRun(SampledConfig(**values))
    else:
        run = FullBatchRun(FullBatchConfig(**values))
    result = run.train().as_dict()
    state = {**run._learner.shared_state(), **run._learner.local_state()}
    return {"state": state, **{key: result[key] for key in ("losses", "best", "last")}}


def processes(mark: str) -> list[tuple[int, dict[str, str]]]:
    """Processes of a case that run, with what they were started with."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            content = Path(f"/proc/{entry}/environ").read_bytes()
            if mark.encode() in content:
                pairs = [item.partition("=") for item in content.decode().split("\0")]
                found.append((int(entry), {name: value for name, _, value in pairs}))
    return found


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Where processes listen, as an address of this machine that reaches it."""
    sockets: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            names = os.listdir(f"/proc/{pid}/fd")
            sockets |= {os.readlink(f"/proc/{pid}/fd/{name}") for name in names}
    found = set()
    for table, everywhere in (("tcp", "127.0.0.1"), ("tcp6", "::1")):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                digits, port = local.split(":")
                is_ipv4 = table == "tcp" and int(digits, 16)
                host = socket.inet_ntoa(bytes.fromhex(digits)[::-1]) if is_ipv4 else everywhere
                found.add((host, int(port, 16)))
    return found


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def send(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def shared_files() -> set[str]:
    """Names of our files in shared memory, apart from empty ones, which the next run removes.

    Not folders: those are of graph servers, which these jobs do not start, but other tests do.
    """
    found = set()
    for path in _SHARED_MEMORY.glob("graphshard-*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode) and status.st_size:
                found.add(path.name)
    return found


def left_behind(folder: Path, mark: str, before: set[str]) -> str | None:
    """What a job that is gone has left behind, if anything."""
    temporary = [
        item.name
        for item in (folder / "tmp").iterdir()
        if not item.name.startswith(_FOREIGN) and not any(item.glob("_remote_module_*"))
    ]
    if temporary:
        return f"left temporary files behind: {temporary}"
    new = shared_files() - before
    stop = time.monotonic() + 5.0  # others on this machine may be using theirs
    while new and time.monotonic() < stop:
        time.sleep(0.2)
        new &= shared_files()
    left = new - in_use(new)
    return f"left shared memory behind: {sorted(left)}" if left else None


def in_use(names: set[str]) -> set[str]:
    """Those that some process has mapped or open."""
    found: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{entry}/maps").read_text(errors="replace")
                links = [
                    os.readlink(f"/proc/{entry}/fd/{n}") for n in os.listdir(f"/proc/{entry}/fd")
                ]
                found |= {name for name in names if name in maps or any(name in k for k in links)}
    return found


def run_cases(
    campaign: Campaign, cases: Sequence[Case], side_by_side: int = 1
) -> Iterator[Finding]:
    """Run cases; findings come in their order."""
    with ThreadPoolExecutor(side_by_side) as pool:
        yield from pool.map(campaign.run, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side-by-side", type=int, default=1, choices=(1, 2))
    parser.add_argument("--write", action="store_true", help="write a report")
    options = parser.parse_args()
    outcomes: dict[str, Counter[str]] = {}
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kill-cases-") as folder:
        campaign = Campaign(Path(folder), options.seed)
        numbers = range(options.first, options.first + options.count)
        cases = [Case.draw(number, options.seed) for number in numbers]
        for finding in run_cases(campaign, cases, options.side_by_side):
            case = finding.case
            print(f"{finding.outcome} after {finding.seconds:.1f} s: {case}", flush=True)
            if finding.outcome not in EXPECTED:
                print(finding.text, flush=True)
            short = finding.outcome.partition(":")[0]
            outcomes.setdefault(case.row, Counter())[short] += 1
            if case.action not in HARMLESS and finding.outcome != WAITS:
                slowest[case.action] = max(slowest.get(case.action, 0.0), finding.seconds)
    notes = [
        f"Timeout {TIMEOUT:g} s. Slowest end after the signal: "
        + ", ".join(f"{action} {seconds:.1f} s" for action, seconds in sorted(slowest.items()))
        + ". torchrun waits half a minute for a process that is stopped."
    ]
    for row, counts in sorted(outcomes.items()):
        print(row, dict(counts))
    print(*notes)
    if options.write:
        print(
            write_report(
                "kills",
                "Training jobs of which one process was killed, stopped, suspended or silent at "
                "some moment, or to whose ports strangers came",
                f"python {' '.join(sys.argv)}",
                dict(sorted(outcomes.items())),
                notes,
            )
        )


if __name__ == "__main__":
    main()
