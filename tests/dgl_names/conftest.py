# SPDX-License-Identifier: Apache-2.0
"""Makes the graphs of tests/graph, and DGL's twins of them, importable here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "graph"))
