# SPDX-License-Identifier: Apache-2.0
"""run_together: several layers whose aggregations share passes over the shards.

A typed layer is one module per relation, and each module aggregates in the middle of its own
forward. Run one after the other they would fetch the same source rows once per relation. Here
each module runs in a thread of its own until it asks for an aggregation; when all of them have
asked (or are done), the caller's thread answers all requests in one go, and they go on.

Exactly one thread runs at any time, in an order that depends on the program alone: threads are
used as coroutines. Gradient mode and autocast are the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Request = tuple[Any, ...]
Answer = Callable[[list[Request]], list[Any]]

_LOOK_INTERVAL = 1.0  # seconds between looks at whether a waiting thread's partner is still there


class _Abandoned(BaseException):
    """Ends a module's thread after another one failed."""


class _Coroutine(threading.Thread, Generic[T]):
    def __init__(self, call: Callable[[], T], device: torch.device) -> None:
        super().__init__(name="graphshard-relation", daemon=True)
        self._call = call
        self._kind = device.type
        self._caller = threading.current_thread()
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled(self._kind)
        self._autocast_dtype = torch.get_autocast_dtype(self._kind)
        self._resumed, self._paused = threading.Event(), threading.Event()
        self.request: Request | None = None
        self.answer: Any = None
        self.result: T | None = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.newest_node = 0

    def run(self) -> None:
        try:
            with (
                torch.set_grad_enabled(self._grad),
                torch.autocast(self._kind, self._autocast_dtype, self._autocast),
            ):
                self.result = self._call()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.request = None
            self.newest_node = _newest_node()
            self._paused.set()

    def advance(self) -> None:
        """Let the module run to its next request, or to its end."""
        if self.ident is None:
            self.start()
        else:
            self._resumed.set()
        while not self._paused.wait(_LOOK_INTERVAL):
            if not self.is_alive():
                break
        self._paused.clear()

    def ask(self, request: Request) -> Any:
        """Called in the module's thread: hand over, and return the answer."""
        self.request = request
        self.newest_node = _newest_node()
        self._paused.set()
        while not self._resumed.wait(_LOOK_INTERVAL):
            if not self._caller.is_alive():
                raise _Abandoned
        self._resumed.clear()
        if self.abandoned:
            raise _Abandoned
        return self.answer


class Together:
    """Where the modules' requests meet.

    Args:
        answer: Results of several requests at once, in their order.
        device: Whose autocast state the modules run under.
    """

    def __init__(self, answer: Answer, device: torch.device) -> None:
        self._answer, self._device = answer, device
        self._running: dict[int, _Coroutine[Any]] = {}

    def current(self) -> _Coroutine[Any] | None:
        """The coroutine whose thread this is, if any."""
        return self._running.get(threading.get_ident())

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Results of the calls, in order. The first error, in that order, is raised."""
        coroutines = [_Coroutine(call, self._device) for call in calls]
        waiting = list(coroutines)
        try:
            while waiting:
                for coroutine in waiting:
                    self._advance(coroutine)
                waiting = [c for c in waiting if c.request is not None]
                if waiting:
                    _make_newer_nodes([c.newest_node for c in coroutines])
                    requests = [c.request for c in waiting if c.request is not None]
                    for coroutine, answer in zip(waiting, self._answer(requests), strict=True):
                        coroutine.request, coroutine.answer = None, answer
        finally:
            for coroutine in coroutines:
                if coroutine.ident is not None and coroutine.is_alive():
                    coroutine.abandoned = True
                    coroutine.advance()
            self._running.clear()
        return [c.result for c in coroutines]  # type: ignore[misc]

    def _advance(self, coroutine: _Coroutine[Any]) -> None:
        if coroutine.ident is None:
            call = coroutine._call

            def registered() -> Any:
                self._running[threading.get_ident()] = coroutine
                return call()

            coroutine._call = registered
        coroutine.advance()
        if coroutine.error is not None:
            raise coroutine.error


def _newest_node() -> int:
    """Sequence number that the next autograd node of this thread gets."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())


def _make_newer_nodes(numbers: Sequence[int]) -> None:
    """Make this thread's next nodes newer than all of ``numbers``.

    Autograd numbers nodes per thread. What tells a tensor that was computed before a message
    function ran from one computed inside it is that order: see [Note: captured tensors] in
    `_user`.
    """
    while _newest_node() <= max(numbers):
        pass
