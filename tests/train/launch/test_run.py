# SPDX-License-Identifier: Apache-2.0
"""How a job ends, with servers, engines and trainers that are a line of Python or shell each.

The agents are real, on this machine; only what they start is not: no torch, no process group.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forked_programs import start_program
from graphshard._base.files import shared_memory_folder
from graphshard.train.launch import JobOutcome, _host_agent, _watch, on_this_machine
from graphshard.train.launch._hosts import JobHosts
from graphshard.train.launch._job_on_hosts import JobCommands, JobLogs, run_job

TOKEN = "a token that is for tests alone"

# Prints what the launcher waits for, and stays.
SERVER = "import os, time; {}; print('up', flush=True); time.sleep(1000)"
# Starts trainers as torchrun does: LOCAL_RANK and all; the first that fails ends the others.
ENGINE = """
export GRAPHSHARD_TORCHRUN_PID=$$
n=0; while [ $n -lt 2 ]; do LOCAL_RANK=$n "$@" & n=$((n+1)); done
trap 'kill $(jobs -p); wait; exit 1' TERM
wait -n || { kill $(jobs -p); wait; echo long report; exit 1; }
wait
"""
NOTE = "import os, time; name = os.environ['NOTES'] + '/' + str(os.getpid()); open(name, 'w'); "
PARENT = "parent = lambda pid: int(open(f'/proc/{pid}/stat').read().rsplit(')')[-1].split()[1]); "
TRAINER = (
    NOTE
    + PARENT
    + "host = int(os.environ['GRAPHSHARD_HOST']); rank = int(os.environ['LOCAL_RANK']); "
)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch, "GRACE_SECONDS", 0.3)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where processes leave their numbers."""
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def commands(trainer: str, notes: Path, server: str = "pass", end: str = "") -> JobCommands:
    """A job of two hosts; the shell of a trainer becomes Python, unless there is an `end`."""
    program = ["{python}", "-S", "-c", SERVER.format(server)]
    watcher = ["{python}", "-c", "{start}", "trainer", "{folder}"]
    engine = ["bash", "-c", ENGINE, "engine", *watcher]
    line = shlex.join(["python", "-S", "-c", TRAINER + trainer])
    return JobCommands(
        server=[program, program],
        up_line=["up", "up"],
        engine=lambda host, port: engine,
        trainer=f"{line}{end}" if end else f"exec {line}",
        num_trainers=2,
        workspace=str(notes),
        environment={"NOTES": str(notes)},
    )


def run(trainer: str, notes: Path, server: str = "pass", **options: Any) -> tuple[JobOutcome, list]:
    lines: list[str] = []
    outcome = run_job(
        on_this_machine(2),
        commands(trainer, notes, server),
        token=TOKEN,
        on_line=lines.append,
        **options,
    )
    check_all_gone(notes)
    return outcome, lines


def check_all_gone(notes: Path, seconds: float = 20.0) -> None:
    """No process that has left its number is there, nor any that has the folder's name."""
    deadline = time.monotonic() + seconds
    while True:
        left = [int(name) for name in os.listdir(notes) if name.isdecimal() and is_alive(int(name))]
        left += [pid for pid in processes() if str(notes) in environment_of(pid)]
        if not left:
            return
        assert time.monotonic() < deadline, f"these processes are left: {left}"
        time.sleep(0.05)


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def environment_of(pid: int) -> str:
    try:
        return f"{Path(f'/proc/{pid}/environ').read_text()}" if pid != os.getpid() else ""
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_all_that_is_printed_has_host_and_rank_before_it(notes: Path) -> None:
    trainer = (
        "print('hello'); import sys; sys.stderr.write('no end'); "
        "print(); print(os.environ['GRAPHSHARD_IP_CONFIG']); "
        "path = os.environ['GRAPHSHARD_TOKEN_FILE']; "
        f"assert open(path).read().strip() == '{TOKEN}'; "
        "assert os.stat(path).st_mode & 0o777 == 0o600; "
        "print(open(os.environ['GRAPHSHARD_IP_CONFIG']).read().count('127.0.0.1'), 'hosts')"
    )
    outcome, lines = run(trainer, notes)
    assert outcome.exit_code == 0, outcome.report()
    assert outcome.report() == ""
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[host {rank // 2} rank {rank}] ")]
        texts = [line.split("] ", 1)[1] for line in mine]
        assert "hello" in texts
        assert "2 hosts" in texts
        assert any("no end" in text for text in texts)
        # The folder of the token went with the job.
        (folder,) = {Path(text).parent for text in texts if text.endswith("/ip_config")}
        assert not folder.exists()
    assert "[host 0 server] up" in lines
    assert "[host 1 server] up" in lines


def test_the_first_failure_is_reported_first_and_stops_all(notes: Path) -> None:
    trainer = (
        "os.system('sleep 1000 & trap : TERM; sleep 1000 &'); "
        "time.sleep(0.3 if (host, rank) == (1, 0) else 1000); print('the reason'); os._exit(7)"
    )
    outcome, lines = run(trainer, notes)
    assert outcome.exit_code == 7
    report = outcome.report().splitlines()
    assert report[0] == "error: host 1 rank 2 ended with exit code 7"
    assert report[1] == "  | the reason"
    assert "[host 1 rank 2] ended with exit code 7; all hosts are told to stop" in lines
    assert not any("long report" in line for line in lines), "torchrun repeats what is known"


def test_a_trainer_that_blames_another_one_is_not_the_first_cause(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 3 says that the fault is another rank's."""
    monkeypatch.setattr(_watch, "GRACE_SECONDS", 3.0)
    trainer = (
        "[time.sleep(0.01) for _ in range(2000) if len(os.listdir(os.environ['NOTES'])) < 4]; "
        "(host, rank) == (0, 0) and os._exit(3); "
        "(host, rank) == (1, 1) and (time.sleep(0.15), print('mine'), os._exit(9)); time.sleep(99)"
    )
    outcome, _ = run(trainer, notes)
    assert outcome.exit_code == 9
    assert "error: host 1 rank 3 ended with exit code 9" in outcome.report()
    assert "then host 0 rank 0 ended with exit code 3" in outcome.report()


def test_a_server_that_is_killed_is_named(notes: Path) -> None:
    server = "open(os.environ['NOTES'] + f'/server{os.environ[\"GRAPHSHARD_HOST\"]}', 'w')"
    server += ".write(str(os.getpid()))"
    trainer = (
        "time.sleep(0.2 if (host, rank) == (0, 0) else 1000); "
        "os.kill(int(open(os.environ['NOTES'] + '/server1').read()), 9); time.sleep(1000)"
    )
    outcome, _ = run(trainer, notes, server)
    assert outcome.exit_code == 1
    assert outcome.report().startswith("error: host 1 server ended with signal SIGKILL")


def test_a_server_that_does_not_start_is_named(notes: Path) -> None:
    server = "os.environ['GRAPHSHARD_HOST'] == '1' and (print('no such file'), os._exit(2))"
    outcome, _ = run("pass", notes, server)
    assert outcome.exit_code == 2
    assert outcome.report() == "error: host 1 server ended with exit code 2\n  | no such file"
    late = commands("pass", notes)
    late = JobCommands(
        server=[late.server[0], ["{python}", "-S", "-c", "import time; time.sleep(1000)"]],
        up_line=late.up_line,
        engine=late.engine,
        trainer=late.trainer,
        num_trainers=2,
        workspace=str(notes),
        environment=late.environment,
    )
    outcome = run_job(
        on_this_machine(2), late, token=TOKEN, on_line=lambda line: None, start_timeout=1.0
    )
    assert outcome.report().startswith("error: host 1 server was not up within 1 s")
    check_all_gone(notes)


def test_trainers_have_a_timeout_after_the_first_has_ended(notes: Path) -> None:
    trainer = (
        "busy = os.environ['NOTES'] + '/busy'; "
        "(host, rank) == (1, 1) and [print('busy', flush=True), open(busy, 'w'), time.sleep(99)]; "
        "[time.sleep(0.01) for _ in range(2000) if not os.path.exists(busy)]"
    )
    outcome, _ = run(trainer, notes, timeout=2.0)
    assert outcome.exit_code == 1
    assert outcome.report() == (
        "error: host 1 rank 3 did not end within 2 s after the first trainer had\n  | busy"
    )


def test_a_host_that_cannot_be_reached_is_named(notes: Path) -> None:
    hosts = on_this_machine(2)
    refused = ["sh", "-c", "echo connection refused >&2; exit 255"]
    hosts = JobHosts(hosts.addresses, [hosts.commands[0], refused], "ssh")
    outcome = run_job(hosts, commands("pass", notes), token=TOKEN, on_line=lambda line: None)
    assert outcome.exit_code == 255
    assert outcome.report().splitlines()[:2] == [
        "error: host 1 (127.0.0.1) is gone: ssh ended with exit code 255",
        "  | connection refused",
    ]
    check_all_gone(notes)


def test_a_command_is_a_line_of_the_shell_of_its_host(notes: Path) -> None:
    """What a shell of this machine prints for the same line, in the same folder."""
    for name in ("one.txt", "two.txt"):
        (notes / name).touch()
    line = (
        'A="b  c" python -c "import os; print(os.environ[\'A\'])"; echo $HOME *.txt "*" && (exit 3)'
    )
    right = subprocess.run(["sh", "-c", line], cwd=notes, capture_output=True, text=True)
    assert right.returncode == 3
    lines: list[str] = []
    outcome = run_job(
        on_this_machine(2),
        replace(commands("", notes), trainer=line),
        token=TOKEN,
        on_line=lines.append,
    )
    assert outcome.exit_code == 3
    for rank in range(4):  # the first that ends has the others ended
        prefix = f"[host {rank // 2} rank {rank}] "
        printed = [each.removeprefix(prefix) for each in lines if each.startswith(prefix)]
        if printed[: len(right.stdout.splitlines())] == right.stdout.splitlines():
            break
    else:
        raise AssertionError(lines)


def test_python_is_the_interpreter_that_runs_the_agent(notes: Path) -> None:
    names = ["python", "python3", "python3.8"]
    line = "; ".join(f"env {name} -c 'import sys; print(sys.prefix)'" for name in names)
    lines: list[str] = []
    outcome = run_job(
        on_this_machine(1),
        replace(commands("", notes), trainer=line),
        token=TOKEN,
        on_line=lines.append,
    )
    assert outcome.exit_code == 0, outcome.report()
    for rank in range(2):
        assert lines.count(f"[host 0 rank {rank}] {sys.prefix}") == 3, lines


def test_what_a_shell_has_started_ends_with_it(notes: Path) -> None:
    """A trainer that takes no notice of SIGTERM, under a shell that waits for it."""
    program = NOTE + "import signal; signal.signal(15, signal.SIG_IGN); print('there'); "
    program += "rank = int(os.environ['RANK']); time.sleep(1 if rank else 1000); os._exit(rank)"
    line = f"export RANK=$((GRAPHSHARD_HOST * 2 + LOCAL_RANK)); python -Sc {shlex.quote(program)}"
    outcome = run_job(
        on_this_machine(2),
        replace(commands("", notes), trainer=f"{line}; exit $?"),
        token=TOKEN,
        on_line=lambda line: None,
    )
    assert outcome.exit_code in (1, 2, 3)
    check_all_gone(notes)


@pytest.mark.exhaustive
def test_an_agent_that_is_killed_takes_what_shells_have_started_with_it(notes: Path) -> None:
    """The agent's end ends torchrun, that the watchers, and those what takes no notice of it."""
    trainer = (
        "import signal; signal.signal(15, signal.SIG_IGN); agent = os.getpid(); "
        "agent = [agent := parent(agent) for _ in range(4)][-1]; "
        "(host, rank) == (1, 0) and (time.sleep(1), os.kill(agent, 9)); time.sleep(1000)"
    )
    outcome = run_job(
        on_this_machine(2),
        commands(trainer, notes, end="; exit $?"),
        token=TOKEN,
        on_line=lambda line: None,
    )
    assert "host 1 (127.0.0.1) is gone: its agent ended with signal SIGKILL" in outcome.report()
    check_all_gone(notes, 40.0)


def test_a_trainer_that_a_signal_has_ended_under_a_shell_is_said_to_be(notes: Path) -> None:
    trainer = "(host, rank) == (0, 0) and os.kill(os.getpid(), 9); time.sleep(1000)"
    outcome = run_job(
        on_this_machine(2),
        commands(trainer, notes, end="; exit $?"),
        token=TOKEN,
        on_line=lambda line: None,
    )
    assert outcome.report().startswith(
        "error: host 0 rank 0 ended with exit code 137, as a shell says for signal SIGKILL"
    )
    check_all_gone(notes)


def test_an_agent_loads_no_torch() -> None:
    """It is started on many hosts, and only watches others."""
    program = _host_agent.START.replace("module.main(sys.argv[1:])", "print(*sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    modules = done.stdout.split()
    assert "graphshard.train.launch._host_agent" in modules, done.stderr
    assert {"torch", "numpy"}.isdisjoint(modules)


def test_shells_and_interpreters_that_cannot_be_used_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shell, used in (("/bin/sh", "/bin/sh"), ("/usr/sbin/nologin", "/bin/sh"), ("", "/bin/sh")):
        monkeypatch.setenv("SHELL", shell)
        assert _host_agent._shell() == used
    monkeypatch.setenv("PATH", "/one:/two")
    (tmp_path / "python").touch(0o700)
    assert _host_agent._path(tmp_path) == f"{tmp_path}:/one:/two"
    monkeypatch.setattr(os, "access", lambda *_: False)  # no file may be run there
    assert _host_agent._path(tmp_path) == f"{os.path.dirname(sys.executable)}:/one:/two"


def test_a_watcher_that_is_killed_is_named_and_not_rank_0(notes: Path) -> None:
    trainer = (
        "(host, rank) == (0, 1) and (time.sleep(0.5), os.kill(os.getppid(), 9)); time.sleep(1000)"
    )
    outcome, lines = run(trainer, notes)
    assert outcome.report().startswith(
        "error: host 0 rank 1 was ended, because the process that watches it was killed"
    )
    assert outcome.exit_code == 1
    assert not any("rank 0] ended" in line for line in lines)


def test_torchrun_that_is_killed_is_named_and_not_a_rank(notes: Path) -> None:
    trainer = "(host, rank) == (0, 1) and (time.sleep(0.5), os.kill(parent(os.getppid()), 9)); "
    outcome, _ = run(trainer + "time.sleep(1000)", notes)
    assert outcome.report().startswith("error: host 0 torchrun ended with signal SIGKILL")


def test_torchrun_that_does_not_end_is_named(notes: Path) -> None:
    """It is stopped while its trainers end well."""
    trainer = "(host, rank) == (0, 1) and os.kill(parent(os.getppid()), 19)"
    outcome, _ = run(trainer, notes, timeout=2.0)
    assert outcome.report().startswith("error: host 0 torchrun did not end within 2 s")


def test_what_a_killed_server_has_left_goes_with_its_agent(notes: Path, tmp_path: Path) -> None:
    """A folder whose owner holds a lock on it, where tables are: in shared memory."""
    memory = shared_memory_folder() or tempfile.gettempdir()
    left = Path(memory) / f"graphshard-folder-{os.getpid()}-left"
    server = (
        f"import fcntl; path = '{left}' + os.environ['GRAPHSHARD_HOST']; os.mkdir(path, 0o700); "
        "folder = os.open(path, os.O_RDONLY); fcntl.flock(folder, 2); open(path + '/table', 'w'); "
        "os.environ['GRAPHSHARD_HOST'] == '1' and (print('up', flush=True), time.sleep(0.3), "
        "os.kill(os.getpid(), 9))"
    )
    outcome, _ = run("time.sleep(1000)", notes, server)
    assert outcome.report().startswith("error: host 1 server ended with signal SIGKILL")
    assert not list(left.parent.glob(f"{left.name}*"))


SUSPENDED = """
import sys
sys.path.insert(0, {folder!r})
import test_run
from pathlib import Path
outcome = test_run.run_job(
    test_run.on_this_machine(2), test_run.commands(sys.argv[1], Path(sys.argv[2])),
    token=test_run.TOKEN, on_line=lambda line: print(line, flush=True), silence=7.0)
print(outcome.report(), flush=True)
"""


@pytest.mark.exhaustive  # it takes as long as agents are patient
def test_a_launcher_that_was_suspended_says_so(notes: Path) -> None:
    program = SUSPENDED.format(folder=str(Path(__file__).parent))
    launcher = start_program(program, "print('there', flush=True); time.sleep(1000)", str(notes))
    try:
        there = 0
        while there < 4:
            there += launcher.stdout.readline().endswith("there\n")
        launcher.send_signal(signal.SIGSTOP)
        check_all_gone(notes, 60.0)  # the agents have ended what they had started
        launcher.send_signal(signal.SIGCONT)
        printed, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    report = printed[printed.index("error: ") :]
    assert report.startswith("error: the launcher was suspended for ")
    assert "nothing was heard of the launcher for 7 s" in printed


def test_each_process_has_a_log_that_the_report_of_a_failure_names(notes: Path) -> None:
    trainer = (  # one fails once all have printed
        "print('I am', host, rank, flush=True); folder = os.environ['NOTES']; "
        "open(f'{folder}/printed {host} {rank}', 'w'); "
        "printed = lambda: sum(name.startswith('printed') for name in os.listdir(folder)); "
        "(host, rank) == (1, 0) or time.sleep(1000); "
        "[time.sleep(0.01) for _ in range(2000) if printed() < 4]; 1 / 0"
    )
    logs = JobLogs(notes / "logs", lambda text: None)
    outcome, lines = run(trainer, notes, logs=logs)
    logs.close(keep=True)
    report = replace(outcome, logs=logs.folder).report()
    assert report.splitlines()[-1] == f"what each process printed is in {logs.folder}"
    for host in range(2):
        assert (logs.folder / f"host{host}-server.log").read_text() == "up\n"
        for rank in range(2):
            text = (logs.folder / f"host{host}-rank{2 * host + rank}.log").read_text()
            assert text.startswith(f"I am {host} {rank}\n")
    assert "ZeroDivisionError" in (logs.folder / "host1-rank2.log").read_text()
    # What is not shown, as it is known by then, is kept as well.
    assert "long report" in (logs.folder / "host1-torchrun.log").read_text()
    assert not any("long report" in line for line in lines)


def test_logs_that_cannot_be_written_do_not_end_a_job(tmp_path: Path) -> None:
    told: list[str] = []
    logs = JobLogs(tmp_path, told.append)
    logs.folder.rmdir()
    for _ in range(3):
        logs.add("host 0 server", "up")
    assert len(told) == 1
    assert "No such file" in told[0]
    temporary = JobLogs(None, told.append)
    for number in range(300):  # more than are open at a time
        temporary.add(f"host {number % 150} rank 0", f"{number}")
    assert (temporary.folder / "host7-rank0.log").read_text() == "7\n157\n"
    temporary.close(keep=False)
    assert not temporary.folder.exists()


@pytest.mark.exhaustive  # it takes as long as a host has to stop
def test_a_host_that_falls_silent_is_named(notes: Path) -> None:
    """An agent that is stopped says nothing any more; the others are told to stop."""
    trainer = (
        "(host, rank) == (1, 0) and os.kill(parent(parent(os.getppid())), 19); time.sleep(1000)"
    )
    outcome, _ = run(trainer, notes, silence=7.0)
    assert outcome.report().startswith("error: host 1 (127.0.0.1) has said nothing for 7 s")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)]
)
def test_a_signal_stops_all_hosts(notes: Path, number: signal.Signals) -> None:
    there = []

    def on_line(line: str) -> None:
        there.extend([line] if line.endswith("there") else [])
        if len(there) == 4:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        run_job(
            on_this_machine(2),
            commands("os.system('sleep 1000 &'); print('there'); time.sleep(1000)", notes),
            token=TOKEN,
            on_line=on_line,
        )
    assert len(os.listdir(notes)) == 4
    check_all_gone(notes)


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import test_run
from pathlib import Path
test_run.run_job(test_run.on_this_machine(2), test_run.commands(sys.argv[1], Path(sys.argv[2])),
                 token=test_run.TOKEN, on_line=lambda line: print(line, flush=True))
"""


def test_no_process_is_left_when_the_launcher_is_killed(notes: Path) -> None:
    program = PROGRAM.format(folder=str(Path(__file__).parent))
    trainer = "print('there', flush=True); time.sleep(1000)"
    launcher = start_program(program, trainer, str(notes))
    try:
        there = 0
        while there < 4:
            line = launcher.stdout.readline()
            assert line, "the launcher has ended"
            there += line.endswith("there\n")
    finally:
        launcher.kill()
        launcher.communicate(timeout=30)
    check_all_gone(notes)


@pytest.mark.exhaustive
def test_an_agent_that_is_killed_takes_its_processes_with_it(notes: Path) -> None:
    trainer = (
        "(host, rank) == (1, 0) and (time.sleep(0.5), os.kill(parent(parent(os.getppid())), 9)); "
        "time.sleep(1000)"
    )
    outcome, _ = run(trainer, notes)
    assert "host 1 (127.0.0.1) is gone: its agent ended with signal SIGKILL" in outcome.report()


@pytest.mark.exhaustive
def test_lines_that_are_no_messages_are_shown(notes: Path) -> None:
    """A login script may print."""
    hosts = on_this_machine(2)
    login = ["sh", "-c", 'echo welcome; exec "$@"', "sh"]
    hosts = JobHosts(hosts.addresses, [[*login, *command] for command in hosts.commands], "ssh")
    lines: list[str] = []
    outcome = run_job(hosts, commands("pass", notes), token=TOKEN, on_line=lines.append)
    assert outcome.exit_code == 0, outcome.report()
    assert "[host 0] welcome" in lines


def test_the_token_is_on_no_command_line(notes: Path) -> None:
    trainer = (
        "all = os.popen('cat /proc/[0-9]*/cmdline 2>/dev/null').read(); "
        f"print(all.count('{TOKEN[:9]}' + '{TOKEN[9:]}'), 'times in', len(all))"
    )
    outcome, lines = run(trainer, notes)
    assert outcome.exit_code == 0, outcome.report()
    assert sum("] 0 times in " in line for line in lines) == 4, json.dumps(lines)
