# SPDX-License-Identifier: Apache-2.0
"""Public helpers for testing programs that run on several ranks."""

from ._ranks import RanksFailed, run_ranks, stop_ranks

__all__ = ["RanksFailed", "run_ranks", "stop_ranks"]
