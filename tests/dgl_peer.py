# SPDX-License-Identifier: Apache-2.0
"""DGL, the oracle of many tests, imported without its warnings.

Where it is not installed, a test is skipped as soon as it uses it, and a file that uses it while it
is imported is skipped whole.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

__all__ = ["dgl", "dgl_fn", "dgl_nn"]


class _Absent:
    def __getattr__(self, name: str) -> Any:
        pytest.skip("DGL is the oracle, and has no release here", allow_module_level=True)


dgl: Any = _Absent()
dgl_fn: Any = dgl
dgl_nn: Any = dgl
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import dgl
        import dgl.distributed
        import dgl.function as dgl_fn
        import dgl.nn.pytorch as dgl_nn
    except ImportError:
        pass
