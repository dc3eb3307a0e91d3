# SPDX-License-Identifier: Apache-2.0
"""LoaderResources: what a `DataLoader` gives back when it is closed, or dropped."""

from __future__ import annotations

import weakref
from typing import Any

from ...comm import Lanes
from ..feature_store import Rows
from ._pipeline import Crew, Run


class LoaderResources:
    """Row sources, lanes, and the threads of the latest pass.

    Args:
        lanes: The groups of threads, if they communicate.
        rows: Sources of feature rows.
    """

    def __init__(self, lanes: Lanes | None, rows: list[Rows]) -> None:
        self.lanes = lanes
        self._rows = rows
        self._crew: Crew | None = None
        self._run: weakref.ref[Run[Any]] | None = None
        self._failure: str | None = None
        self._is_closed = False

    def keep(self, run: Run[Any]) -> None:
        """A pass has begun."""
        self._run, self._crew = weakref.ref(run), run.crew

    def end_of_pass(self, seconds: float) -> RuntimeError | None:
        """End the latest pass.

        Args:
            seconds: How long its threads may take for what has been permitted.

        Returns:
            What speaks against another pass, if anything does.
        """
        if self._is_closed:
            return RuntimeError("this DataLoader is closed; make another one")
        run = None if self._run is None else self._run()
        if run is not None:
            run.close(0.0)
        if self._crew is not None and not self._crew.join(seconds):
            return RuntimeError(
                f"threads of the last pass over this DataLoader have not ended within "
                f"{seconds:g} s; make another one"
            )
        if self.lanes is None:
            return None
        if self._crew is not None and self._crew.failure is not None:
            self._failure = self._crew.failure
        if self._failure is not None:
            return RuntimeError(
                f"an earlier pass over this DataLoader failed ({self._failure}); make another one"
            )
        if self.lanes.are_broken:
            return RuntimeError("a pass over this DataLoader was cut short; make another one")
        return None

    def close(self) -> None:
        """End the threads whatever they do, and give everything back; not collective."""
        self._is_closed = True
        if self._crew is not None:
            self._crew.cancel()
        if self.lanes is not None:
            self.lanes.close()
        for rows in self._rows:
            rows.close()
        self._rows = []
