# SPDX-License-Identifier: Apache-2.0
"""Work: everything that a `DataLoader` does for a batch, as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...comm import Lanes, trace
from ..feature_store import AccessCounts, CachedRows, FeaturePlan, Rows
from ._mini_batch import MiniBatch
from ._pipeline import Pipeline, Stage
from ._stages import (
    DEVICE,
    FEATURES,
    SAMPLING,
    Fetching,
    Finishing,
    LoaderStats,
    Place,
    Sampling,
)


class Work:
    """The stages of a loader.

    Args:
        sampling: Draws blocks, over its lane.
        rows: Where features come from, over their lane; None if there are none.
        plan: Which features.
        prefetch: As for `Pipeline`.
        lanes: The groups of the threads, if they have any.
    """

    def __init__(
        self,
        sampling: Sampling,
        rows: Rows | None,
        plan: FeaturePlan,
        prefetch: int,
        lanes: Lanes | None,
    ) -> None:
        self._sampling, self._rows, self._plan = sampling, rows, plan
        self._fetching = fetching = None if rows is None else Fetching(rows, plan)
        drawn_on = sampling.structure.device
        wanted = sampling.sampler.output_device
        device = torch.empty(0, device=drawn_on if wanted is None else wanted).device
        finishing = Finishing(plan, device)
        stages = [Stage(SAMPLING, sampling)]
        if device != drawn_on:
            stages += [] if fetching is None else [Stage(FEATURES, fetching)]
            stages.append(Stage(DEVICE, finishing))
        elif fetching is not None:  # attaching is not worth a thread
            stages.append(Stage(FEATURES, _in_turn(fetching, finishing)))
        self.pipeline = Pipeline(stages, prefetch, None if lanes is None else lanes.cancelled)

    @property
    def cache_hit_rate(self) -> float:
        """Part of the accesses to remote rows that the cache answered, since it was filled."""
        return self._rows.hit_rate if isinstance(self._rows, CachedRows) else 0.0

    def begin(self, stats: LoaderStats) -> LoaderStats:
        """Count a new pass in ``stats``, which is returned."""
        self._sampling.stats = stats
        if self._fetching is not None:
            self._fetching.stats = stats
        return stats

    def fill_cache(self, places: Sequence[Place]) -> None:
        """If there is a cache, draw a pass to count how often it reads each row; collective."""
        if not isinstance(self._rows, CachedRows):
            return
        counts = AccessCounts()
        with torch.no_grad():
            for place in places:
                counts.add(self._plan.requests(self._sampling.draw(place)))
            with trace(only_this_thread=True) as sent:
                self._rows.prepare(counts.totals())
        self._sampling.stats.feature_bytes += sent.total_bytes


def _in_turn(first: Fetching, second: Finishing) -> Callable[[MiniBatch], MiniBatch]:
    return lambda batch: second(first(batch))
