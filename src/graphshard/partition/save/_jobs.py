# SPDX-License-Identifier: Apache-2.0
"""Jobs: work done by threads in the background, none of whose errors is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Jobs:
    """A few threads, and what they are to do, in the order given. Use as a context manager.

    Leaving it waits for the threads; after an error, what has not begun is dropped.

    Args:
        num_threads: Jobs that run at a time.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=num_threads)
        self._jobs: deque[Future[Any]] = deque()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a function called; the error of an earlier job is raised here."""
        while self._jobs and self._jobs[0].done():  # they begin in order
            self._jobs.popleft().result()
        made = self._pool.submit(function, *args, **kwargs)
        self._jobs.append(made)
        return made

    def finish(self) -> None:
        """Wait for all jobs; the first error is raised at once."""
        done, _ = wait(self._jobs, return_when=FIRST_EXCEPTION)
        for job in done:
            job.result()
