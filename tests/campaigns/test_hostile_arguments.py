# SPDX-License-Identifier: Apache-2.0
"""Hostile arguments end in an error for the caller or a right result, and never in a signal.

A process of its own, which forks. With ``--all``: 20,000 calls and the tests of operators on a
build with AddressSanitizer and UndefinedBehaviorSanitizer, which takes cmake, GCC and nanobind.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from campaign_report import write_report
from hostile_arguments import calls_of, other_calls, stub_arguments
from hostile_operators import NOT_CALLED, RECIPES

from graphshard import ops
from graphshard._base.kernels import _load, extension_available

pytestmark = pytest.mark.skipif(
    not extension_available(), reason="it is the compiled kernels that hostile arguments try"
)

SCRIPT = Path(__file__).with_name("hostile_arguments.py")
ROOT = SCRIPT.parents[2]
BUILD = ROOT / "build" / "sanitize"
SANITIZERS = {
    # Python keeps what it has at its end; a request for too much memory is no finding.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}
CALLS = 800
ALL_CALLS = 20000


def test_every_public_operator_is_tried() -> None:
    names = {name.split(",")[0] for name in RECIPES}
    assert names | NOT_CALLED == set(ops.__all__)
    assert not names & NOT_CALLED


def test_the_stub_declares_every_function_of_the_binding_layer() -> None:
    module: Any = _load()
    kinds = {name for name in dir(module) if name.startswith("Attention")}
    found = {name for name in dir(module) if callable(getattr(module, name))}
    assert {name.split(".")[0] for name in stub_arguments()} - {
        "AttentionOperands"
    } == found - kinds


def test_every_function_of_the_binding_layer_is_tried() -> None:
    rng = random.Random(0)
    calls = other_calls(rng)
    for name in RECIPES:
        for _ in range(20):  # what it asks for depends on what it is given
            calls += calls_of(name, rng)
    declared = {name.removesuffix(".__init__") for name in stub_arguments()}
    assert {call.name for call in calls} == declared


def test_a_sample_of_hostile_calls(tmp_path: Path) -> None:
    found = hostile_calls(tmp_path / "outcomes.json", CALLS, {})
    assert found["findings"] == []


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_hostile_calls_and_tests_of_operators_under_sanitizers(tmp_path: Path) -> None:
    """Builds the kernels first, which takes minutes."""
    absent = [name for name in ("cmake", "g++") if shutil.which(name) is None]
    if absent:
        pytest.skip(f"a build with sanitizers needs {', '.join(absent)}")
    environment = sanitized_environment()
    found = hostile_calls(tmp_path / "outcomes.json", ALL_CALLS, environment, "--sanitized")
    pytest_on_it = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "hostile_arguments"]
    tests = subprocess.run(
        [*pytest_on_it, "tests/ops"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    last = (tests.stdout.strip().splitlines() or ["nothing"])[-1]
    write_report(
        "hostile_arguments",
        "Hostile arguments for every public operator and every function of the binding layer, "
        "under AddressSanitizer and UndefinedBehaviorSanitizer",
        "python -m pytest tests/campaigns/test_hostile_arguments.py --all",
        {target: Counter(counts) for target, counts in sorted(found["counts"].items())},
        [
            f"Findings: {len(found['findings'])}. A call gives the result of plain torch, or an "
            "error that is worded for the caller, whose type heads its column.",
            f"The tests of operators (`tests/ops`) on the same build: {last}",
        ],
    )
    assert found["findings"] == []
    assert tests.returncode == 0, tests.stdout[-4000:] + tests.stderr[-4000:]


def hostile_calls(
    outcomes: Path, calls: int, environment: dict[str, str], *options: str
) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--calls", str(calls), "--outcomes", str(outcomes), *options],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert outcomes.exists(), ended.stdout[-4000:] + ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(outcomes.read_text())
    if found["findings"]:
        sys.stderr.write(ended.stderr[-8000:])
    return found


def sanitized_environment() -> dict[str, str]:
    """Build the extension with sanitizers; what a process needs to run with it."""
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release",
        "-DGRAPHSHARD_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    for command in (configure, ["cmake", "--build", str(BUILD), "-j", str(os.cpu_count() or 1)]):
        built = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
        assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    (extension,) = BUILD.glob("_kernels*.so")
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        **os.environ,
        **SANITIZERS,
        "LD_PRELOAD": " ".join(runtimes),
        "GRAPHSHARD_CAMPAIGN_EXTENSION": str(extension),
    }
