# SPDX-License-Identifier: Apache-2.0
"""Triton's compiler takes every kernel, for a GPU that need not be there. One process each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no release here")


@pytest.mark.parametrize(
    "dtype",
    ["fp32", "bf16", *(pytest.param(d, marks=pytest.mark.exhaustive) for d in ("fp64", "fp16"))],
)
def test_kernels_compile_for_a_gpu(dtype: str, tmp_path: Path, run_all: bool) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = str(Path(__file__).with_name("compile_triton.py"))
    command = [sys.executable, program, dtype, *["all"][:run_all]]
    subprocess.run(command, env=environment, timeout=500 if run_all else 110, check=True)
