# SPDX-License-Identifier: Apache-2.0
"""``python -m graphshard.dgl program``: as the interpreter alone, but for what dgl and sar are.

Each case is a process, forked where its start is not the point; some start more, and one starts 2
gloo ranks under torchrun.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from forked_programs import forked_interpreters
from graphshard.dgl import load_ipython_extension, unedited

pytestmark = pytest.mark.timeout(300)

REPORT = """
import json, sys
import __main__
print(json.dumps([
    sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name,
    vars(__main__) is globals(), sorted(set(globals()) - {"__annotations__"}),
]))
"""

PROGRAMS = {
    "reports.py": REPORT,
    "raises.py": "def f():\n    raise ValueError('no')\n\nf()\n",
    "chained.py": "try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise OSError('x') from e\n",
    "hooked.py": "import sys\nsys.excepthook = lambda k, e, t: print(k, t.tb_lineno)\n1 / 0\n",
    "exits.py": "import sys\nsys.exit(7)\n",
    "says_why.py": "import sys\nsys.exit('why')\n",
    "interrupted.py": "raise KeyboardInterrupt\n",
    "lacks.py": "import no_such_module\n",
    "broken.py": "def f(:\n    pass\n",
    "guarded.py": "if __name__ == '__main__':\n    print('main')\n",
    "folder/__main__.py": REPORT.replace("sys.path[0]", "sys.path[0][-6:]"),
    "package/__init__.py": "",
    "package/module.py": REPORT + "from . import beside\n",
    "package/beside.py": "",
    "package/raises.py": "def f():\n    raise ValueError('no')\n\nf()\n",
}

COMMANDS = [
    "reports.py -x 1 --m",
    "raises.py",
    "-m package.module -x",
    *(
        pytest.param(command, marks=pytest.mark.exhaustive)
        for command in (
            "exits.py",
            "broken.py",
            "folder a",
            "-m no_such_module",
            "chained.py",
            "hooked.py",
            "says_why.py",
            "interrupted.py",
            "lacks.py",
            "guarded.py",
            "no_such_file.py",
            "-m package.raises",
        )
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("programs")
    for name, text in PROGRAMS.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def run_code(code: str, folder: Path, *before: str, arguments: Sequence[str] = ()) -> str:
    """What a program prints, run as ``python -m graphshard.dgl``."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(code))
    done = run([*(before or ("-m", "graphshard.dgl")), str(path), *arguments], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_runpy(traceback: str) -> str:
    """The interpreter shows its own frames of ``-m``; they are no part of the program."""
    lines, skip = [], False
    for line in traceback.splitlines():
        if line.startswith("  File "):
            skip = "runpy" in line
        elif not line.startswith("    "):
            skip = False
        if not skip:
            lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_program_runs_as_with_the_interpreter_alone(
    command: str, folder: Path, run_all: bool
) -> None:
    plain = run(command.split(), folder)
    with contextlib.nullcontext() if command == "raises.py" or run_all else forked_interpreters():
        ours = run(["-m", "graphshard.dgl", *command.split()], folder)
    assert ours.stdout == plain.stdout
    assert without_runpy(ours.stderr) == without_runpy(plain.stderr)
    assert ours.returncode == plain.returncode
    assert not (folder / "__pycache__").exists() or "-m" in command


def test_the_command_says_how_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = "usage: python -m graphshard.sar (SCRIPT | -m MODULE)"
    monkeypatch.setattr(sys, "argv", ["graphshard.sar", "--help"])
    unedited.main("graphshard.sar")
    assert usage in capsys.readouterr().out
    for arguments in ([], ["-m"], ["--no-such-option"]):
        monkeypatch.setattr(sys, "argv", ["graphshard.sar", *arguments])
        with pytest.raises(SystemExit) as ended:
            unedited.main("graphshard.sar")
        assert ended.value.code == 2
        assert usage in capsys.readouterr().err


NAMES = """
    import multiprocessing
    import sys

    import dgl
    import dgl.data
    import dgl.function as fn
    import dgl.function.message
    import dgl.nn.pytorch.conv.gatconv as gatconv
    import sar
    import sar.core.graphshard
    from dgl.nn.pytorch import GATConv
    from sar.config import Config
    from sar.core.sampling import DataLoader

    import graphshard
    import graphshard.dgl
    import graphshard.sar


    def child(queue):
        import dgl.distributed, sar.comm

        queue.put((dgl is sys.modules["graphshard.dgl"], sar.comm.__name__, __name__))


    if __name__ == "__main__":
        for alias, module in list(sys.modules.items()):
            top = alias.partition(".")[0]
            if top in ("dgl", "sar"):
                assert module is sys.modules[f"graphshard.{alias}"], alias
                assert module.__name__ == f"graphshard.{alias}", alias
                spec = module.__spec__
                assert spec is None or spec.name == f"graphshard.{alias}", alias
        assert fn is graphshard.dgl.function and GATConv is graphshard.nn.GATConv
        assert gatconv.GATConv is GATConv and dgl.batch is graphshard.dgl.batch
        assert sar.GraphShardManager is graphshard.GraphShardManager
        assert DataLoader is graphshard.sar.DataLoader and Config is graphshard.sar.Config
        graph = dgl.graph(([0, 1], [1, 0]))
        assert isinstance(graph, graphshard.Graph) and isinstance(dgl.to_dgl(graph), dgl.DGLGraph)
        softmax = dgl.nn.functional.edge_softmax
        assert gatconv.edge_softmax is softmax
        with sar.patch_dgl():
            assert gatconv.edge_softmax is sar.patched_edge_softmax
            assert dgl.nn.RelGraphConv is sar.RelGraphConv
        assert gatconv.edge_softmax is softmax
        for method in sys.argv[1:]:
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(method, *queue.get(timeout=100))
            process.join()
"""


@pytest.mark.usefixtures("forked_interpreters")
def test_names_are_those_of_this_package_also_in_children(tmp_path: Path, run_all: bool) -> None:
    methods = {"fork": "__main__", "spawn": "__mp_main__"}
    if run_all:
        methods["forkserver"] = "__mp_main__"
    assert run_code(NAMES, tmp_path, arguments=list(methods)).splitlines() == [
        f"{method} True graphshard.sar.comm {main}" for method, main in methods.items()
    ]


GUIDE = "see docs/guides/dgl_names.md"
SAR_GUIDE = "see docs/guides/migrating_from_sar.md"
MISSING = {
    "import dgl.nope": "ModuleNotFoundError: No module named 'dgl.nope': dgl.nope is not here; "
    f"{GUIDE}",
    "import dgl.function.nope": "ModuleNotFoundError: No module named 'dgl.function.nope': "
    f"dgl.function.nope is not here; {GUIDE}",
    "import dgl; dgl.nope": "AttributeError: module 'dgl' has no attribute 'nope': dgl.nope is not "
    f"here; {GUIDE}",
    "from dgl import nope": "ImportError: cannot import name 'nope' from 'dgl': dgl.nope is not "
    f"here; {GUIDE}",
    "from dgl.function import nope": "ImportError: cannot import name 'nope' from 'dgl.function': "
    f"dgl.function.nope is not here; {GUIDE}",
    "from dgl.nn import NopeConv": "ImportError: cannot import name 'NopeConv' from 'dgl.nn': "
    f"dgl.nn.NopeConv is not here; {GUIDE}",
    "import sar.nope": "ModuleNotFoundError: No module named 'sar.nope': sar.nope is not here; "
    f"{SAR_GUIDE}",
    "from sar.core.sar_aggregation import sar_op": "ImportError: cannot import name 'sar_op' from "
    f"'sar.core.sar_aggregation': sar.core.sar_aggregation.sar_op is not here; {SAR_GUIDE}. "
    "update_all and apply_edges of the sharded graph do it; see docs/design/full_batch.md",
    "import dgl; print(hasattr(dgl, 'nope'), hasattr(dgl.nn, 'Nope'), getattr(dgl, 'a', 1))": "no",
    "import dgl; dgl.__nope__": "AttributeError: module 'dgl' has no attribute '__nope__'",
}


@pytest.mark.usefixtures("forked_interpreters")
def test_what_is_missing_says_where_to_look(tmp_path: Path) -> None:
    code = f"""
for statement in {list(MISSING)!r}:
    try:
        exec(statement)
        print("no")
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
"""
    printed = run_code(code, tmp_path).splitlines()
    printed.remove("False False 1")
    assert printed == list(MISSING.values())


@pytest.mark.usefixtures("forked_interpreters")
def test_pytest_runs_tests_that_import_dgl(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import dgl\nGRAPH = dgl.graph(([0], [1]))\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_graph():\n"
        "    from dgl.heterograph import DGLGraph\n"
        "    from conftest import GRAPH\n"
        "    assert isinstance(GRAPH, DGLGraph)\n"
        "def test_that_fails():\n"
        "    import sar\n"
        "    assert sar.__name__ == 'sar'\n"
    )
    done = run(["-m", "graphshard.sar", "-m", "pytest", "-q", "-p", "no:cacheprovider"], tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "AssertionError: assert 'graphshard.sar' == 'sar'" in done.stdout


@pytest.mark.usefixtures("nested_forks")
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    code = """
        import sys
        import sar
        from torch import ones

        sar.initialize_comms()
        total = sar.comm.all_reduce(ones(1), "sum")
        sys.stdout.write(f"{sar.__name__} {sar.rank()} {int(total)} {sys.argv[1:]}\\n")
        sar.shutdown_comms()
    """
    path = tmp_path / "ranks.py"
    path.write_text(textwrap.dedent(code))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*torchrun, "-m", "graphshard.dgl", str(path), "-a"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "graphshard.sar 0 2 ['-a']",
        "graphshard.sar 1 2 ['-a']",
    ]


def test_extension_of_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="notebooks need IPython")
    code = """
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance(history_manager=None)
        shell.run_line_magic("load_ext", "graphshard.dgl")
        shell.run_line_magic("load_ext", "graphshard.sar")
        assert shell.run_cell("import dgl.nn, sar; print(dgl.__name__, sar.__name__)").success
    """
    (tmp_path / "profile").mkdir()
    printed = run_code(code, tmp_path, "-W", "ignore")
    assert printed.splitlines()[-1] == "graphshard.dgl graphshard.sar"


def test_another_package_of_the_name_is_not_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = list(sys.meta_path)
    monkeypatch.setitem(sys.modules, "dgl", types.ModuleType("dgl"))
    with pytest.raises(
        ImportError, match=r"dgl is imported already, from .* start the process anew"
    ):
        load_ipython_extension(None)
    assert not unedited.is_installed()
    assert sys.meta_path == finders
