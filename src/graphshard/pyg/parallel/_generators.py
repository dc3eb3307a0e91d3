# SPDX-License-Identifier: Apache-2.0
"""Random states that are equal on all ranks around a call, and differ within it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ...comm.collectives import broadcast_
from ...comm.group import GroupState
from ...fullbatch.execution import RandomState


def share_generators(state: GroupState) -> None:
    """Give every rank rank 0's random states, of torch, numpy and Python; collective."""
    if state.world_size == 1:
        return
    kind, keys, position, *_ = np.random.get_state()  # the old generator has a tuple
    version, numbers, _ = random.getstate()
    parts = [
        torch.get_rng_state().long(),
        torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        torch.tensor([int(position), *numbers]),
    ]
    stream = broadcast_(state, torch.cat(parts), 0, "parallelize")
    if state.rank == 0:
        return
    of_torch, of_numpy, rest = stream.split([part.numel() for part in parts])
    position, *numbers = rest.tolist()
    torch.set_rng_state(of_torch.to(torch.uint8))
    np.random.set_state((kind, of_numpy.numpy().astype(np.uint32), position, 0, 0.0))
    random.setstate((version, tuple(numbers), None))


@contextmanager
def own_draws(state: GroupState, device: torch.device, seed: int) -> Iterator[None]:
    """Random states of this rank alone; the common ones are afterwards what they were before.

    Args:
        state: The ranks.
        device: Where the model is.
        seed: Of the draws.
    """
    if state.world_size == 1:
        yield
        return
    before, of_python, of_numpy = (
        RandomState.capture(device),
        random.getstate(),
        np.random.get_state(),
    )
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        before.restore(device)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
