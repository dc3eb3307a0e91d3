# SPDX-License-Identifier: Apache-2.0
"""Trials: one function over many mutations of a folder, and what came of each. Forked processes.

The trials of a chunk run one after another in a forked child, which reports each as a line of JSON.
A child that dies, or does not report in time, is charged to the mutation it was at, and the next
child goes on after it. What a trial may give is the result of the undamaged folder, or a clean
error: one of ours, in our words, that names the file or its folder. Everything else is wrong.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from mutations import files_of, mutate

import graphshard
from graphshard import GraphShardError

SAME, CLEAN = "same result", "clean error"

MEMORY_FACTOR = 2
MEMORY_CONSTANT = 32 << 20
"""A trial may touch twice the bytes of the folder, and this many more, of memory."""

ADDRESS_CONSTANT = 1 << 30
"""A trial may reserve twice the bytes of the folder, and this many more, of addresses."""

_PACKAGE = str(Path(graphshard.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of one mutation.

    Args:
        number: Number of the mutation.
        mutation: What it did.
        outcome: `SAME`, `CLEAN`, or what was wrong.
        detail: The error's text, or the end of its traceback.
    """

    number: int
    mutation: str
    outcome: str
    detail: str

    @property
    def is_allowed(self) -> bool:
        return self.outcome in (SAME, CLEAN)

    def __str__(self) -> str:
        return f"{self.outcome}: mutation {self.mutation}\n    {self.detail}"


@dataclasses.dataclass
class Campaign:
    """The trials of a campaign."""

    trials: list[Trial] = dataclasses.field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(trial.outcome for trial in self.trials)

    @property
    def wrong(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.is_allowed]

    def check(self) -> None:
        """Raise AssertionError with the first of the trials that went wrong, if any did."""
        wrong = self.wrong
        if wrong:
            listed = "\n".join(str(trial) for trial in wrong[:20])
            raise AssertionError(
                f"{len(wrong)} of {len(self.trials)} trials went wrong: {dict(self.outcomes)}\n"
                f"{listed}"
            )


def run_trials(
    use: Callable[[Path], Any],
    original: Path,
    scratch: Path,
    numbers: Iterable[int],
    *,
    damage: Callable[[Path, int], str] = mutate,
    deadline: float = 60.0,
    chunk: int = 200,
) -> Campaign:
    """Run ``use`` on a damaged copy of a folder, once for each number.

    Args:
        use: What is tried. It gets the folder, and returns something that can be compared with
            ``==`` (see `digest`); an exception is its other outcome. It runs in a forked child with
            one thread, once undamaged before the trials of a chunk.
        original: The undamaged folder.
        scratch: An empty folder to work in. Copies lie at ``scratch/<name of original>``.
        numbers: Numbers of the mutations.
        damage: What damages a copy; returns what it did.
        deadline: Seconds for one trial; what takes longer hangs.
        chunk: Trials per child.
    """
    campaign = Campaign()
    waiting = list(numbers)
    while waiting:
        done = _run_chunk(use, original, scratch, waiting[:chunk], damage, deadline)
        campaign.trials += done
        waiting = waiting[len(done) :]
    shutil.rmtree(scratch / original.name, ignore_errors=True)
    return campaign


def digest(value: Any) -> str:
    """Digest of tensors and plain values, nested in dicts, lists and tuples as may be."""
    total = hashlib.blake2b(digest_size=16)
    _add(total, value)
    return total.hexdigest()


def _add(total: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        total.update(f"{value.dtype}{tuple(value.shape)}".encode())
        total.update(flat.numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            total.update(f"{key}:".encode())
            _add(total, value[key])
    elif isinstance(value, list | tuple):
        total.update(f"{len(value)}[".encode())
        for item in value:
            _add(total, item)
    else:
        total.update(f"{value!r};".encode())


# ------------------------------------------------------------------------------------- the parent


def _run_chunk(
    use: Callable[[Path], Any],
    original: Path,
    scratch: Path,
    numbers: list[int],
    damage: Callable[[Path, int], str],
    deadline: float,
) -> list[Trial]:
    """Trials up to the first that ended the child."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(use, original, scratch, numbers, damage, write)
    os.close(write)
    done: list[Trial] = []
    at: list[str] = []  # what the child is at
    status = None
    try:
        with os.fdopen(read, "rb", buffering=0) as pipe:
            for line in _lines(pipe, deadline):
                if line is None:
                    ended = f"hang: no answer in {deadline:.0f} s"
                    break
                values = json.loads(line)
                if "failed" in values:
                    raise AssertionError(f"the undamaged folder: {values['failed']}")
                if "at" in values:
                    at = [values["at"]]
                else:
                    done.append(Trial(**values))
                    at = []
            else:
                _, status = os.waitpid(pid, 0)
                ended = _ending(status)
    finally:
        if status is None:
            _kill(pid)
    if len(done) < len(numbers):
        what = at[0] if at else f"{numbers[len(done)]}: not begun"
        done.append(Trial(numbers[len(done)], what, ended, ""))
    return done


def _lines(pipe: Any, deadline: float) -> Any:
    """Lines of a child; None if one is late."""
    text, last = b"", time.monotonic()
    while True:
        left = last + deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            yield None
            return
        received = pipe.read(1 << 16)
        if not received:
            return
        *lines, text = (text + received).split(b"\n")
        if lines:
            last = time.monotonic()
        yield from lines


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"crash: {signal.Signals(os.WTERMSIG(status)).name}"
    return f"crash: exit status {os.WEXITSTATUS(status)}"


def _kill(pid: int) -> None:
    """End a child that we forked, and what it started: it leads a group of its own."""
    for target in (os.killpg, os.kill):
        try:
            target(pid, signal.SIGKILL)
            break
        except ProcessLookupError:
            continue
    os.waitpid(pid, 0)


# -------------------------------------------------------------------------------------- the child


def _child(
    use: Callable[[Path], Any],
    original: Path,
    scratch: Path,
    numbers: list[int],
    damage: Callable[[Path, int], str],
    write: int,
) -> None:
    """Run trials and end the process; never returns."""
    status = 1
    try:
        os.setsid()
        faulthandler.disable()
        torch.set_num_threads(1)  # a forked copy of a pool of threads has no threads
        warnings.simplefilter("ignore")
        with open(os.devnull, "r+b") as null:
            for standard in (0, 1, 2):
                os.dup2(null.fileno(), standard)
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        _try_all(use, original, scratch, numbers, damage, write)
        status = 0
    except BaseException:
        _tell(write, failed=traceback.format_exc()[-2000:])
    finally:
        os._exit(status)


def _tell(write: int, **values: Any) -> None:
    data = json.dumps(values).encode() + b"\n"
    while data:
        data = data[os.write(write, data) :]


def _try_all(
    use: Callable[[Path], Any],
    original: Path,
    scratch: Path,
    numbers: list[int],
    damage: Callable[[Path, int], str],
    write: int,
) -> None:
    copy = scratch / original.name
    size = sum(path.stat().st_size for path in files_of(original))
    _fresh_copy(original, copy)
    expected = use(copy)
    allowed = MEMORY_FACTOR * size
    limit = _status("VmSize") + allowed + ADDRESS_CONSTANT
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    for number in numbers:
        _fresh_copy(original, copy)
        done = damage(copy, number)
        _tell(write, at=done)
        before = _reset_peak()
        outcome, detail = _try(use, copy, expected)
        grown = _status("VmHWM") - before
        if grown > allowed + MEMORY_CONSTANT:
            detail = f"{grown >> 20} MiB more for {size >> 10} KiB of files ({outcome}: {detail})"
            outcome = "memory"
        trial = Trial(number, done, outcome, detail)
        _tell(write, **dataclasses.asdict(trial))


def _try(use: Callable[[Path], Any], folder: Path, expected: Any) -> tuple[str, str]:
    try:
        result = use(folder)
    except BaseException as error:
        return _judged(error, folder)
    if result == expected:
        return SAME, ""
    return "wrong: silent difference", f"{result!r:.200} and not {expected!r:.200}"


def _judged(error: BaseException, folder: Path) -> tuple[str, str]:
    """A clean error is of a class that callers catch, raised by us, and names what is damaged."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))
    kind, text = type(error).__name__, str(error)
    detail = f"{kind}: {text[:400]} ({where})"
    if not isinstance(error, GraphShardError | ValueError | OSError):
        return f"wrong: traceback {kind}", detail
    names = {str(folder), *(path.name for path in folder.rglob("*"))}
    ours = bool(frames) and frames[-1].filename.startswith(_PACKAGE)
    if not ours or not any(name in text for name in names):
        return f"wrong: unworded {kind}", detail
    return CLEAN, detail


def _fresh_copy(original: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)


def _status(field: str) -> int:
    """Bytes of a line of this process's status."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status on {sys.platform}")


def _reset_peak() -> int:
    """Begin a new peak of resident memory; returns what is resident."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return _status("VmRSS")
