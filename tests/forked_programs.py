# SPDX-License-Identifier: Apache-2.0
"""Python programs in processes of their own that start at once, because torch is imported already.

Inside `forked_interpreters`, which is also a fixture of tests/conftest.py, what starts this
interpreter through `subprocess` (``-c``, ``-m`` or a file) gets on Linux a process that is forked
from one that has imported torch, with what torch imports late, and graphshard, of which importing
reads no environment and starts nothing; `cold_forks` are without graphshard. It is a child of
this process in every respect: descriptors, environment, folder, session, number, signals and exit
code are those of an interpreter that was started, and the program is ``__main__``. `start_program`
and `run_program` do so for a text. Elsewhere torch must not be forked, and an interpreter starts.
It does, too, where there is a driver for GPUs: packages open it when they are imported, and a
process that is forked then cannot use it.

An interpreter also starts where an option, or a variable that one of `FIXED` begins, is not that of
the process that is forked. MALLOC_MMAP_THRESHOLD_ and OMP_NUM_THREADS are set as if they had been
there from the start. Not as in an interpreter of its own: the command line and the environment in
/proc, the seed of hashes, which all have in common, and what happens to threads when an
interpreter ends, where a forked process does not fail as one does that was started. Tests of these
do not use it, nor do some of each way to start workers.

With `NESTED` in its environment, which `nested_forks` sets, a forked program has one more child, of
which the interpreters that it starts in turn are forked, and so on: ranks of torchrun, and the
process that `run_ranks` forks ranks from.

So are the processes in which pytest-xdist runs the tests (`forked_workers`), with all that tests
import, and the process that `run_ranks` forks ranks from in each of them, but nothing else that
they start (`begin_worker`): a seventh of a minute's work of one core that was done six times.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

NESTED = "GRAPHSHARD_TEST_NESTED"
FIXED = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "ATEN_", "DNNL_"),
    *("ONEDNN_", "TORCH_", "PYTORCH_", "TRITON_", "CUDA_", "NPY_", "OPENBLAS_"),
)
"""What begins the names of variables that count when Python or torch is loaded."""
SET_LATER = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
)
WARM = ("graphshard", "graphshard.train.commands", "torch.distributed.run")
OF_WORKERS = ("graphshard", "dgl", "pytest", "torch_geometric")
"""What workers of pytest-xdist have imported, as far as it is installed."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_M_MMAP_THRESHOLD = -3


class Template:
    """The process that programs are forked from."""

    def __init__(self, control: socket.socket, environment: Mapping[str, str]) -> None:
        self._control = control
        self._fixed = fixed(environment)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def started(cls, *modules: str) -> Template:
        """One that is an interpreter of its own, and has imported some modules and torch."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        environment.pop("MALLOC_MMAP_THRESHOLD_", None)
        template = cls(ours, environment)
        template._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        return template

    def can_start(self, words: list[str], environment: Mapping[str, str]) -> bool:
        """Whether a program that is forked is as one that is started."""
        if words[1:2] == ["-u"]:
            words = words[1:]
        known = len(words) > 1 and (words[1] in ("-c", "-m") or words[1].endswith(".py"))
        is_alike = known and fixed(environment) == self._fixed
        return is_alike and self._owner == os.getpid()

    def start(self, request: dict[str, Any], descriptors: dict[int, int]) -> int:
        """Start a program; its process number.

        Args:
            request: What `_become` reads.
            descriptors: Those of the program, and what they are here.
        """
        request = {**request, "parent": os.getpid(), "descriptors": list(descriptors)}
        prctl = ctypes.CDLL(None).prctl
        with self._lock, open(os.memfd_create("request"), "w+b") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            # What starts the program ends, and so the program becomes a child of this process.
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._control, [b"start"], [file.fileno(), *descriptors.values()])
                answer = self._control.recv(64)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the process that programs are forked from has ended"
        return int(answer)

    def stop(self) -> None:
        self._control.close()
        if self._process is not None:
            self._process.wait(60)


_templates: dict[str, Template] = {}
_patches: list[contextlib.AbstractContextManager[None]] = []


@contextlib.contextmanager
def forked_interpreters(*modules: str, only: str = "") -> Iterator[None]:
    """Interpreters that are started meanwhile are forked; see above.

    Args:
        modules: Those that the process has imported which they are forked from; `WARM` unless
            given.
        only: A module: nothing but ``-m`` of it is forked.
    """
    if not _may_fork():
        yield
        return
    modules = modules or WARM
    key = " ".join(modules)
    if key not in _templates:
        _templates[key] = Template.started(*modules)
    template = _templates[key]
    owner: Any = subprocess if hasattr(subprocess, "_fork_exec") else subprocess._posixsubprocess  # type: ignore[attr-defined]
    name = "_fork_exec" if owner is subprocess else "fork_exec"
    exec_ = getattr(owner, name)

    def start(*given: Any) -> int:
        words, _, close, kept, folder, variables, *rest = given
        stdin, _, _, stdout, _, stderr, _, answers, _, session = rest[:10]
        group_user_and_more = [value for value in rest[10:] if not isinstance(value, bool)]
        words = [os.fsdecode(word) for word in words]
        pairs = os.environb.items() if variables is None else (v.split(b"=", 1) for v in variables)
        environment = {os.fsdecode(key): os.fsdecode(value) for key, value in pairs}
        first = next((v for v in group_user_and_more if isinstance(v, functools.partial)), None)
        plain = close and all(v in (None, -1) or v is first for v in group_user_and_more)
        is_python = bool(words) and words[0] == sys.executable
        is_wanted = is_python and (not only or words[1:3] == ["-m", only])
        if not plain or not is_wanted or not template.can_start(words, environment):
            return int(exec_(*given))
        own = {fd: fd for fd in kept if fd != answers}
        own |= {fd: fd if to == -1 else to for fd, to in enumerate((stdin, stdout, stderr))}
        request = {
            "words": words,
            "environment": environment,
            "folder": os.getcwd() if folder is None else os.path.abspath(os.fsdecode(folder)),
            "session": bool(session),
            "first": first and [first.func.__module__, first.func.__qualname__, *first.args],
        }
        return template.start(request, own)

    # From Python 3.13 on most programs are started in another way, unless this forbids it.
    spawning = mock.patch.object(subprocess, "_USE_POSIX_SPAWN", False)
    with mock.patch.object(owner, name, start), spawning:
        yield


@functools.cache
def _may_fork() -> bool:
    """Whether a process that has imported torch, and what uses it, may be forked here."""
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def cold_forks() -> contextlib.AbstractContextManager[None]:
    """As `forked_interpreters`, from a process that has not imported graphshard."""
    return forked_interpreters("torch")


@contextlib.contextmanager
def nested_forks() -> Iterator[None]:
    """As `forked_interpreters`, also for what such a program starts, and so on."""
    with forked_interpreters(), mock.patch.dict(os.environ, {NESTED: "1"}):
        yield


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """As `nested_forks`, for the processes of pytest-xdist."""
    installed = [name for name in OF_WORKERS if importlib.util.find_spec(name.split(".")[0])]
    with forked_interpreters(*installed), mock.patch.dict(os.environ, {NESTED: "1"}):
        yield


def begin_worker() -> None:
    """In a worker that was forked, have but the process that ranks are forked from be forked."""
    if os.environ.pop(NESTED, None) is None or not _patches:  # an interpreter of its own
        return
    _patches.pop().__exit__(None, None, None)
    _templates[" ".join(OF_WORKERS)] = _templates.pop(" ".join(WARM))
    _patches.append(forked_interpreters(*OF_WORKERS, only="graphshard.testing._template"))
    _patches[-1].__enter__()


def start_program(program: str, *arguments: str, **env: str | None) -> subprocess.Popen[str]:
    """Start a program, with pipes for what it reads and prints.

    Args:
        program: Its text, which may be indented.
        arguments: Its ``sys.argv[1:]``.
        env: Changes of the environment; None removes a variable.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
    with forked_interpreters():
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            env={k: v for k, v in variables.items() if v is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def run_program(program: str, *arguments: str, timeout: float = 60.0, **env: str | None) -> str:
    """What a program printed that must end well."""
    with start_program(program, *arguments, **env) as started:
        try:
            out, errors = started.communicate(timeout=timeout)
        finally:
            started.kill()
    assert started.returncode == 0, errors
    return out


def stop() -> None:
    """End the processes that programs are forked from."""
    while _templates:
        _templates.popitem()[1].stop()


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process has from its start."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FIXED) and name not in SET_LATER
    }


# -- in the process that is forked -----------------------------------------------------------------


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork at each message; returns in a program's process alone, with what it is to do."""
    number, tell = os.pipe()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 64, 250)
        if not data:
            os._exit(0)
        first = os.fork()
        if first == 0:
            pid = os.fork()
            if pid == 0:
                control.close()
                os.close(number)
                os.close(tell)
                with open(descriptors.pop(0), "rb") as file:
                    file.seek(0)
                    request: dict[str, Any] = json.loads(file.read())
                for number_of_signal in _IGNORED:
                    signal.signal(number_of_signal, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _place(descriptors, request["descriptors"])
                while os.getppid() != request["parent"]:
                    time.sleep(0.0002)
                return request
            os.write(tell, str(pid).encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(first, 0)
        control.send(os.read(number, 64))


def _place(descriptors: list[int], targets: list[int]) -> None:
    """Move descriptors to the numbers that they have in the program."""
    import fcntl

    above = max([*descriptors, *targets]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)


_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _fork_from_here() -> None:
    """Have what this process starts forked from a child that is as this process is now.

    Returns in each program's process, and here.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        sys.modules["forked_programs"] = sys.modules["__main__"]  # to whom asks for it by name
        _templates.clear()
        _templates[" ".join(WARM)] = Template(ours, _ENVIRONMENT)
        _patches.append(forked_interpreters())
        _patches[-1].__enter__()
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in _IGNORED:  # they are for the programs of the process group
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, theirs.fileno())
    os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    sys.exit(_run_to_its_end(*_become(_serve(theirs))))


def _become(request: dict[str, Any]) -> tuple[ModuleType, list[str]]:
    """Make this process what an interpreter with such a command line is at its start."""
    environment = request["environment"]
    if request["session"]:
        os.setsid()
    if NESTED in environment:
        _fork_from_here()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    if threshold := environment.get("MALLOC_MMAP_THRESHOLD_"):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(threshold))
    if request["first"]:  # preexec_fn
        module, name, *arguments = request["first"]
        getattr(importlib.import_module(module), name)(*arguments)
    threads = environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    torch.set_num_threads(int(threads))
    tempfile.tempdir = None  # torch has asked for it
    numpy.random.seed()
    torch.seed()
    how, *arguments = request["words"][1:]
    if how == "-u":
        how, *arguments = arguments
    if request["words"][1] == "-u" or environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    path = environment.get("PYTHONPATH", "")
    sys.path[:] = [
        *(entry if entry else os.getcwd() for entry in path.split(os.pathsep) if path),
        *sys.path[1:],
    ]
    sys.orig_argv[:] = request["words"]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main, [how, *arguments]


def _run(main: ModuleType, how: str, *arguments: str) -> None:
    """Run a program as ``__main__``."""
    if how == "-m":
        sys.argv[:] = ["-m", *arguments[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[0], alter_argv=True)  # type: ignore[attr-defined]
    elif how == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        exec(compile(arguments[0], "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    else:
        sys.argv[:] = [how, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.realpath(how)))
        path = os.path.abspath(how)
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        main.__dict__.update(__file__=path, __cached__=None)
        exec(code, main.__dict__)  # noqa: S102


def _run_to_its_end(main: ModuleType, words: list[str]) -> int:
    """Run a program, and report what it raises as the interpreter does; the exit code."""
    try:
        _run(main, *words)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


if __name__ == "__main__":
    import gc
    import importlib
    import runpy
    import tempfile
    import warnings

    import numpy
    import torch

    _ENVIRONMENT = dict(os.environ)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports for a second, at the first call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a test imports says so in the test
        for module in sys.argv[2:]:
            importlib.import_module(module)
        for module in [m for name, m in sys.modules.items() if name.startswith("graphshard")]:
            for name in getattr(module, "__all__", ()):  # some are imported when one is used
                if not module.__name__.startswith("graphshard.train") and name != "predict":
                    getattr(module, name)  # but not the code of training
    gc.collect()
    gc.freeze()
    sys.exit(_run_to_its_end(*_become(_serve(socket.socket(fileno=int(sys.argv[1]))))))
