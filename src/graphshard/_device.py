# SPDX-License-Identifier: Apache-2.0
"""device_of: where tensors are that are put on a device, as they say it themselves."""

from __future__ import annotations

import torch


def device_of(device: torch.device | str) -> torch.device:
    """A device with its number: "cuda" is the current one.

    Raises:
        ValueError: Torch has no such device here.
    """
    if isinstance(device, torch.device) and device.type == "cpu" and device.index is None:
        return device
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"device must be one that torch has here (got {str(device)!r}: {error}); leave it out, "
            "or give another"
        ) from error
