# SPDX-License-Identifier: Apache-2.0
"""Replay: compute again under the random state and the autocast mode of the first time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class Replay:
    """Random state and autocast as they were in the forward; both put back on the way out.

    Args:
        random: The generators' states then; None where nothing was drawn.
        autocast: Whether it was enabled, and its dtype.
        device: Where it is computed.
    """

    def __init__(
        self,
        random: RandomState | None,
        autocast: tuple[bool, torch.dtype],
        device: torch.device,
    ) -> None:
        self._random, self._device = random, device
        enabled, dtype = autocast
        kind = device.type
        self._autocast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        self._outside: RandomState | None = None

    def __enter__(self) -> None:
        if self._random is not None:
            self._outside = RandomState.capture(self._device)
            self._random.restore(self._device)
        self._autocast.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._autocast.__exit__(*exc)
        if self._outside is not None:
            self._outside.restore(self._device)
