# SPDX-License-Identifier: Apache-2.0
"""replayed: compute again under the random state and the autocast mode of the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RandomState:
    """The generators' states at one point, to compute a shard again with the same draws."""

    cpu: Tensor
    device: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        on_gpu = device.type == "cuda"
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@contextmanager
def replayed(
    random: RandomState | None, autocast: tuple[bool, torch.dtype], device: torch.device
) -> Iterator[None]:
    """Random state and autocast as they were in the forward; both put back on the way out.

    Args:
        random: The generators' states then; None where nothing was drawn.
        autocast: Whether it was enabled, and its dtype.
        device: Where it is computed.
    """
    outside = None if random is None else RandomState.capture(device)
    enabled, dtype = autocast
    try:
        if random is not None:
            random.restore(device)
        with torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield
    finally:
        if outside is not None:
            outside.restore(device)
