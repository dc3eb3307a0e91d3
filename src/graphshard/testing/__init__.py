# SPDX-License-Identifier: Apache-2.0
"""Public helpers for testing programs that run on several ranks."""

from ._ranks import RanksFailed, run_ranks, stop_ranks
from ._servers import LocalServers

__all__ = ["LocalServers", "RanksFailed", "run_ranks", "stop_ranks"]
