# SPDX-License-Identifier: Apache-2.0
"""``python -m graphshard.train.launch CONFIG``: one rank of a run that the launcher started."""

from __future__ import annotations

import sys

from .._config import config_from_json
from ._training import rank_work
from ._worker import run_as_worker

if __name__ == "__main__":
    run_as_worker(lambda: rank_work(config_from_json(sys.argv[1])))
