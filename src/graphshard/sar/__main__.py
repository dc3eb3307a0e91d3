# SPDX-License-Identifier: Apache-2.0
"""``python -m graphshard.sar train.py``: see `graphshard.dgl.unedited`."""

from ..dgl.unedited import main

main("graphshard.sar")
