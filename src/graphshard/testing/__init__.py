# SPDX-License-Identifier: Apache-2.0
"""Public helpers for testing programs that run on several ranks."""

from ._ranks import LocalServers, RanksFailed, run_ranks, stop_ranks

__all__ = ["LocalServers", "RanksFailed", "run_ranks", "stop_ranks"]
