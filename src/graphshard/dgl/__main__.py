# SPDX-License-Identifier: Apache-2.0
"""``python -m graphshard.dgl train.py``: see `graphshard.dgl.unedited`."""

from .unedited import main

main("graphshard.dgl")
