# SPDX-License-Identifier: Apache-2.0
"""run_ranks: values, state, reports, processes. Up to 3 ranks; one test starts interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forked_programs import start_program
from graphshard import initialize_comms
from graphshard.testing import RanksFailed, _processes, run_ranks, stop_ranks


def give_back(rank, world_size, *args):
    return (rank, world_size, args)


def test_values_travel_both_ways():
    base = torch.arange(12.0).view(3, 4)
    tensors = {
        "bfloat16": base.bfloat16(),
        "bool": base > 3,
        "int64": base.long(),
        "empty": torch.empty(0, 3, dtype=torch.float64),
        "scalar": torch.tensor(7),
        "transposed": base.t(),
        "shares": base,
        "also shares": base[1:],
    }
    plain = {"a": (1, [2.5, None, True, "text"], float("inf")), 3: torch.bfloat16, None: []}
    for rank, (got_rank, world_size, (sent, other)) in enumerate(
        run_ranks(give_back, 2, tensors, plain)
    ):
        assert (got_rank, world_size) == (rank, 2)
        assert other == plain
        assert list(sent) == list(tensors)
        for name, tensor in tensors.items():
            assert sent[name].dtype == tensor.dtype
            assert torch.equal(sent[name], tensor)


def process_number(rank, world_size):
    total = torch.tensor([1])
    dist.all_reduce(total)
    assert total.item() == world_size
    return os.getpid()


def test_processes_are_shared_between_world_sizes():
    three = run_ranks(process_number, 3)
    assert len(set(three)) == 3
    assert run_ranks(process_number, 1) == three[:1]
    assert run_ranks(process_number, 2) == three[:2]


def group_exists(rank, world_size):
    return dist.is_initialized()


def raise_in_turn(rank, world_size):
    time.sleep(0.3 * rank)
    raise ValueError(f"this is process {os.getpid()}")


def test_without_group():
    assert run_ranks(group_exists, 2, group=False) == [False, False]


def leaves_a_group(rank, world_size, file):
    initialize_comms(rank, world_size, store=dist.FileStore(file, world_size))
    return os.getpid()


def test_a_rank_that_is_left_with_a_group_is_not_used_again(tmp_path):
    before = run_ranks(leaves_a_group, 2, str(tmp_path / "store"), group=False)
    assert not set(run_ranks(process_number, 2)) & set(before)
    assert run_ranks(group_exists, 2) == [True, True]


def disturb(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.rand(3)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def look(rank, world_size):
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.initial_seed(),
        float(torch.rand(1)),
        os.environ.get("LEFT_BEHIND"),
        os.environ.get("SET_BY_TEST"),
        os.getcwd(),
    )


def test_each_call_starts_from_the_same_state(monkeypatch):
    monkeypatch.setenv("SET_BY_TEST", "yes")
    run_ranks(disturb, 1)
    torch.manual_seed(0)
    expected = (
        torch.float32, True, 1, 0, float(torch.rand(1)), None, "yes", os.getcwd()
    )  # fmt: skip
    assert run_ranks(look, 1) == [expected]


def warn(rank, world_size):
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_warning_filters_of_the_caller_hold():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RanksFailed, match="UserWarning: careful"):
            run_ranks(warn, 1)
        warnings.simplefilter("ignore")
        run_ranks(warn, 1)


def test_output_is_passed_on(capsys):
    run_ranks(speak, 2)
    assert capsys.readouterr().out == "rank 0 speaks\nrank 1 speaks\n"


def speak(rank, world_size):
    print(f"rank {rank} speaks")


def raise_on_one(rank, world_size):
    if rank == 1:
        print("before the error")
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(1))


def test_first_cause_comes_first():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raise_on_one, 3)
    report = str(caught.value)
    assert report.startswith("raise_on_one on 3 ranks failed\n\nrank 1 raised:\n")
    assert report.index("KeyError: 'the cause'") < report.index("rank 0 failed because another")
    assert "  | before the error" in report
    assert sorted(caught.value.errors) == [0, 1, 2]
    assert run_ranks(give_back, 3, "again")[2] == (2, 3, ("again",))


def linger_here(rank, world_size):
    if rank == 1:
        time.sleep(30)
    return "fine"


def test_deadline_shows_where_the_late_ranks_are():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="linger_here on 2 ranks took longer than 1 s") as caught:
        run_ranks(linger_here, 2, timeout=1.0)
    assert time.monotonic() - start < 20
    assert caught.value.results == {0: "fine"}
    assert "rank 1 was still running" in caught.value.errors[1]
    assert "in linger_here" in caught.value.errors[1]
    assert "rank 0 finished" in str(caught.value)


def die(rank, world_size, how):
    if rank == 0:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    return "fine"


@pytest.mark.parametrize(("how", "text"), [("kill", "SIGKILL"), ("exit", "code 3")])
def test_a_rank_that_dies_is_named(how, text):
    with pytest.raises(RanksFailed, match=f"rank 0 ended with {text} and no result"):
        run_ranks(die, 2, how)


def leave_early(rank, world_size):
    if rank == 0:
        raise SystemExit(0)


def test_leaving_is_a_failure():
    with pytest.raises(RanksFailed, match="SystemExit"):
        run_ranks(leave_early, 1)


def test_functions_must_be_importable():
    with pytest.raises(TypeError, match="must be a function that stands in a module"):
        run_ranks(lambda rank, world_size: None, 1)
    with pytest.raises(TypeError, match="must be a function that stands in a module"):
        run_ranks(len, 1)
    with pytest.raises(ValueError, match=r"world_size must be at least 1 \(got 0\)"):
        run_ranks(give_back, 0)


def test_values_that_do_not_travel_are_named():
    with pytest.raises(TypeError, match=r"value\[0\]\['x'\] is a set; only None, bool"):
        run_ranks(give_back, 1, {"x": {1}})
    with pytest.raises(TypeError, match="only dense tensors travel"):
        run_ranks(give_back, 1, torch.eye(2).to_sparse())
    with pytest.raises(RanksFailed, match="value is a object; only None"):
        run_ranks(make_object, 1)


def make_object(rank, world_size):
    return object()


def test_two_files_of_one_name(tmp_path):
    found = []
    for folder, answer in (("one", 1), ("two", 2)):
        file = tmp_path / folder / "same_name.py"
        file.parent.mkdir()
        file.write_text(f"def answer(rank, world_size):\n    return {answer}\n")
        namespace = load(file)
        found += run_ranks(namespace.answer, 1)
    assert found == [1, 2]


def load(file: Path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("same_name", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["same_name"] = module
    spec.loader.exec_module(module)
    return module


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not all(ended(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes were left behind"
        time.sleep(0.05)


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.usefixtures("nested_forks")
def test_stop_ranks_ends_all_processes_and_their_numbers_may_come_again():
    pids = run_ranks(process_number, 2)
    stop_ranks()
    wait_for_end(pids)
    first = run_ranks(process_number, 1)
    assert not set(first) & set(pids)
    largest = int(Path("/proc/sys/kernel/pid_max").read_text())
    next_numbers = {1 + (first[0] + i) % largest for i in range(min(largest, 100_000))}
    # As if ranks that failed had had all the numbers that new ranks may get.
    codes = dict.fromkeys(next_numbers - set(first), 1)
    _processes.pool._template.codes.update(codes)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(raise_in_turn, 3)
    numbers = [int(failed.value.errors[rank].split()[-1]) for rank in range(3)]
    assert numbers[0] == first[0]
    assert codes.keys() >= set(numbers[1:])


@pytest.mark.usefixtures("nested_forks")
def test_where_forking_is_not_safe(monkeypatch):
    """Then each rank is a fresh interpreter; all else is the same."""
    stop_ranks()
    monkeypatch.setattr(_processes, "_CAN_FORK", False)
    try:
        pids = run_ranks(process_number, 2)
        with pytest.raises(RanksFailed, match="rank 0 ended with code 3 and no result"):
            run_ranks(die, 1, "exit")
        assert run_ranks(process_number, 1) != pids[:1]
    finally:
        stop_ranks()


OPENED = """
import ctypes
really = ctypes.CDLL

class Driver:
    def cuDeviceGetCount(self, count):
        return 0  # and not that it has not been initialized

ctypes.CDLL = lambda name, *args, **kwargs: (
    Driver() if name == "libcuda.so.1" else really(name, *args, **kwargs)
)
"""


def test_ranks_are_not_forked_where_a_package_has_opened_a_gpu(tmp_path):
    """As some do when they are imported; CUDA does not outlive a fork."""
    (tmp_path / "dgl.py").write_text(OPENED)
    script = tmp_path / "parent.py"
    script.write_text(
        "import ctypes, os, sys\n"
        "import dgl\n"
        "from graphshard.testing import run_ranks\n"
        "def parents(rank, world_size):\n"
        "    return [os.getppid(), os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK', 'none')]\n"
        "if __name__ == '__main__':\n"
        "    (first, one), (second, other) = run_ranks(parents, 2)\n"
        "    print(first == second == os.getpid(), one, other)\n"
    )
    # An interpreter of its own: what is forked has another `dgl` already.
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.split() == ["True", "none", "none"], done.stderr


def run_file(script):
    """A program that has run the file, and what it printed."""
    program = start_program(
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(script)
    )
    try:
        return program, *program.communicate(timeout=100)
    finally:
        program.kill()


@pytest.mark.usefixtures("nested_forks")
def test_a_file_that_calls_when_it_is_imported_is_refused(tmp_path):
    """Else every rank would start ranks, which would start ranks."""
    script = tmp_path / "parent.py"
    script.write_text(
        "from graphshard.testing import run_ranks\n"
        "def rank_of(rank, world_size):\n"
        "    return rank\n"
        "run_ranks(rank_of, 2, timeout=20)\n"
    )
    _, _, errors = run_file(script)
    assert f"run_ranks was called while a rank imports {script}" in errors
    assert "rank 0 raised" in errors
    assert 'if __name__ == "__main__":' in errors


@needs_proc
@pytest.mark.usefixtures("nested_forks")
def test_ranks_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from graphshard.testing import run_ranks

            def numbers(rank, world_size):
                return [os.getpid(), os.getppid()]

            if __name__ == "__main__":
                found = run_ranks(numbers, 2)
                print(found[0] + found[1], flush=True)
                os.kill(found[1][0], signal.SIGSTOP)  # nor does one that is stopped stay
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    program, printed, errors = run_file(script)
    assert program.returncode == -signal.SIGKILL, errors
    wait_for_end([int(number) for number in printed.strip("[]\n").split(",")])
