# SPDX-License-Identifier: Apache-2.0
"""Pending: rows on their way. Who starts an exchange must also wait for it, even after an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """Rows under way in both directions, moved by threads of the backend.

    Several may be in flight at once, if every rank starts and waits for them in the same order.
    """

    def wait(self) -> list[Tensor]:
        """Wait for all of it; returns what was received. A second call returns the same.

        Raises:
            RankError: A peer failed, or did not answer within the group's timeout.
        """
        ...


class Arrived:
    """Rows that did not have to travel."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = list(rows)

    def wait(self) -> list[Tensor]:
        return self._rows
