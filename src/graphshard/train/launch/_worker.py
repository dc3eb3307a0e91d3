# SPDX-License-Identifier: Apache-2.0
"""What a process does to be a worker: end with its launcher, send events, explain its failure."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from ...errors import ModelError, RankError

PARENT_VARIABLE = "GRAPHSHARD_LAUNCHER_PID"
EVENTS_VARIABLE = "GRAPHSHARD_EVENTS_FD"
FAILURE_MARK = "\x1efailure"

_WATCH_SECONDS = 1.0

WRONG_INPUT_ERRORS = (ValueError, TypeError, NotImplementedError, OSError)
"""What the setting up of a run raises when its input is wrong; graphshard's own are among them."""


def join_ranks(device: str, timeout: float) -> None:
    """Choose the device of this process, by which the backend is chosen, and meet the other ranks.

    Args:
        device: auto, cpu, cuda or cuda:N.
        timeout: Seconds that a wait for another rank may take.
    """
    import torch

    from ..._base.device import choose_device
    from ...comm import initialize_comms

    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    initialize_comms(timeout=timeout, backend="gloo" if device == "cpu" else "auto")


class ExitCode(enum.IntEnum):
    """How a worker, and so the command, ends."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    OTHER_RANK = 3
    INTERRUPTED = 130


def run_as_worker(prepare: Callable[[], Callable[[], None]]) -> NoReturn:
    """Run a worker's work and end the process.

    A worker that fails ends at once, without the farewells of the process group, which may wait for
    ranks that are gone. So does one that gets a signal, which Python would see to after its wait.

    Args:
        prepare: Sets up; an error in it that speaks of wrong input is shown as one line. Returns
            the work.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    end_with_launcher()
    warnings.showwarning = show_warning
    code = ExitCode.DONE
    try:
        try:
            work = prepare()
        except RankError:
            raise
        except WRONG_INPUT_ERRORS as error:
            explain(error)
            code = ExitCode.WRONG_INPUT
        else:
            work()
    except RankError as error:
        explain(error)
        code = ExitCode.OTHER_RANK
    # A full disk, a loss that is not finite, or rows that a user's own model should not give.
    except (OSError, FloatingPointError, ModelError) as error:
        explain(error)
        code = ExitCode.FAILED
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except SystemExit as error:
        code = ExitCode.FAILED if error.code else ExitCode.DONE
    except BaseException:
        _mark()
        import traceback

        traceback.print_exc()
        code = ExitCode.FAILED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code is ExitCode.DONE:
        sys.exit(0)
    os._exit(code)


def explain(error: BaseException) -> None:
    """One line on standard error: the message without line breaks."""
    _mark(error.ranks if isinstance(error, RankError) else ())
    text = " ".join(str(error).split()) or type(error).__name__
    sys.stderr.write(f"error: {text}\n")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    """One line on standard error, in place of ``warnings.showwarning``."""
    sys.stderr.write(f"warning: {' '.join(str(message).split())}\n")


def _mark(blamed: Sequence[int] = ()) -> None:
    """Tell the launcher that what follows is the reason of a failure, which it reports itself."""
    if PARENT_VARIABLE in os.environ:
        sys.stdout.flush()
        sys.stderr.write(" ".join([FAILURE_MARK, *map(str, blamed)]) + "\n")


def send_event(event: Mapping[str, Any]) -> None:
    """Pass plain values to the launcher's ``on_event``; nothing happens without one."""
    if EVENTS_VARIABLE not in os.environ:
        return
    data = memoryview((json.dumps(dict(event)) + "\n").encode())
    while data:
        data = data[os.write(int(os.environ[EVENTS_VARIABLE]), data) :]


def end_with_launcher() -> None:
    """Have this process end when the one that started it does: our launcher, or torchrun's agent.

    Nothing happens where neither did.
    """
    if PARENT_VARIABLE in os.environ:
        parent = int(os.environ[PARENT_VARIABLE])
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
    else:
        return
    from ._children import signal_with_parent

    is_signalled = signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(ExitCode.INTERRUPTED)
    if not is_signalled:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(ExitCode.INTERRUPTED)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that ``finally`` blocks run.

    One that is ignored, as nohup has it, stays ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
