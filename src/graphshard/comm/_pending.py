# SPDX-License-Identifier: Apache-2.0
"""Pending: the handle of a started operation. Who starts one must wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class Pending:
    """Tensors that are being received, by threads of the backend or a stream of the device.

    Several operations may be in flight at once, if every rank starts and waits for them in the
    same order. A rank that fails between must wait all the same, or the others wait for it.

    Args:
        finish: Waits, and returns what was received; called once unless it raises.
    """

    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish: Callable[[], list[Tensor]] | None = finish
        self._received: list[Tensor] = []

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Pending:
        """Tensors that are here already."""
        return Pending(lambda: list(tensors))

    def wait(self, meanwhile: Callable[[], None] | None = None) -> list[Tensor]:
        """Wait for all of it; returns what was received. A second call returns the same.

        Args:
            meanwhile: Called before. If it raises, the error goes on after the wait.

        Raises:
            RankError: A peer failed, or did not answer within the group's timeout.
        """
        if meanwhile is not None:
            try:
                meanwhile()
            except Exception:
                self.wait()
                raise
        if self._finish is not None:
            self._received = self._finish()
            self._finish = None  # and with it what was sent
        return self._received

    def then(self, function: Callable[[list[Tensor]], list[Tensor]]) -> Pending:
        """What ``function`` makes of the tensors, once they are waited for."""
        return Pending(lambda: function(self.wait()))
