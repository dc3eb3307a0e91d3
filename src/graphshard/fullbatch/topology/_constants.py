# SPDX-License-Identifier: Apache-2.0
"""ConstantCache: results that depend only on tensors which never change.

The input features of the first layer are the same tensor in every epoch and need no gradient.
What is computed from them alone - their halo rows, or their aggregate - is computed once per run.
A tensor counts as unchanged while it is the same object at the same version; entries go when one
of their tensors does. Every rank runs the same program on tensors of its own, so the ranks agree
on what is cached and none waits for an exchange that another one skips.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor


class _Entry:
    def __init__(self, tensors: Sequence[Tensor], result: Tensor) -> None:
        self.references = [weakref.ref(t) for t in tensors]
        self.versions = [t._version for t in tensors]
        self.result = result
        self.result_version = result._version

    def holds_for(self, tensors: Sequence[Tensor]) -> bool:
        same = all(r() is t for r, t in zip(self.references, tensors, strict=True))
        versions = [t._version for t in tensors]
        return same and versions == self.versions and self.result._version == self.result_version


class ConstantCache:
    """Maps (what was computed, from which tensors) to the result."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Hashable, tuple[int, ...]], _Entry] = {}

    @staticmethod
    def is_constant(tensors: Sequence[Tensor]) -> bool:
        """Whether a result of these tensors may be kept: none needs a gradient."""
        return all(not t.requires_grad and not t.is_inference() for t in tensors)

    def get(self, what: Hashable, tensors: Sequence[Tensor]) -> Tensor | None:
        """The kept result, or None; ``tensors`` must be constant."""
        entry = self._entries.get((what, tuple(id(t) for t in tensors)))
        return entry.result if entry is not None and entry.holds_for(tensors) else None

    def put(self, what: Hashable, tensors: Sequence[Tensor], result: Tensor) -> None:
        """Keep ``result`` for as long as all of ``tensors`` live."""
        if result.requires_grad or result.is_inference():
            return
        key = (what, tuple(id(t) for t in tensors))
        self._entries[key] = _Entry(tensors, result)
        entries = weakref.ref(self)

        def forget(_: Any) -> None:
            cache = entries()
            if cache is not None:
                cache._entries.pop(key, None)

        for tensor in tensors:
            weakref.finalize(tensor, forget, None).atexit = False

    def __len__(self) -> int:
        return len(self._entries)
