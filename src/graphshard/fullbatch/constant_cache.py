# SPDX-License-Identifier: Apache-2.0
"""ConstantCache: what is computed from tensors that do not change is kept.

[Note: what is kept between calls]
    A rank cannot see that a tensor was written to where torch does not count it: through ``.data``,
    through NumPy, by a user's own kernel. So of a tensor of the user nothing is kept between calls
    unless a ``local_scope`` bounds it. These are all the rows that are kept:

    ==================  =======================  ===========================  =====================
    what                of which tensors         key                          until
    ==================  =======================  ===========================  =====================
    halo rows, sums     all of them marked as    halo or call, and the        a tensor goes, or the
    and other results   constant: features of    tensors: identity and        graph does
    (`ConstantCache`)   the `PartitionData`,     version
                        and `mark_constant`
    halo rows           any source field         halo, and the tensor:        the innermost
    (`HaloRowCache`)                             identity and version         ``local_scope`` ends,
                                                                              or the backward went
                                                                              through the exchange
    halo rows of one    what one layer of PyG    the tensor: identity and     the layer returns
    layer of PyG        reads                    version
    ==================  =======================  ===========================  =====================

    What is marked must not be written to, except in ways that torch counts (``x.mul_(2)``). The
    last row but one goes with its autograd graph, which serves one backward. A kept result that
    comes back from ``update_all`` is a copy on write, so that the caller may write into it.

    The input features of the first layer are the same tensor in every epoch and need no gradient.
    What is computed from them alone - their halo rows, or their aggregate - is computed once per
    run. Every rank runs the same program on tensors of its own, so the ranks agree on what is
    cached and none waits for an exchange that another one skips.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor


class _Entry:
    def __init__(self, tensors: Sequence[Tensor], result: Tensor) -> None:
        self.references = [weakref.ref(t) for t in tensors]
        self.versions = [t._version for t in tensors]
        self.result = result

    def holds_for(self, tensors: Sequence[Tensor]) -> bool:
        same = all(r() is t for r, t in zip(self.references, tensors, strict=True))
        return same and [t._version for t in tensors] == self.versions


class ConstantCache:
    """Maps (what was computed, from which marked tensors) to the result.

    See [Note: what is kept between calls].

    Args:
        like: A cache whose marked tensors are marked here as well, now and later.
    """

    def __init__(self, like: ConstantCache | None = None) -> None:
        self._marked: dict[int, weakref.ref[Tensor]] = {} if like is None else like._marked
        self._entries: dict[tuple[Hashable, tuple[int, ...]], _Entry] = {}

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors for constant, which change only in ways that torch counts."""
        for key in [key for key, marked in self._marked.items() if marked() is None]:
            del self._marked[key]
        self._marked.update({id(t): weakref.ref(t) for t in tensors})

    def is_constant(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a result of these tensors may be kept: all are marked, none needs a gradient."""
        return all(
            (ref := self._marked.get(id(t))) is not None
            and ref() is t
            and not t.requires_grad
            and not t.is_inference()
            for t in tensors
        )

    def get(self, what: Hashable, tensors: Sequence[Tensor]) -> Tensor | None:
        """The kept result, or None; ``tensors`` must be constant."""
        entry = self._entries.get((what, tuple(id(t) for t in tensors)))
        return entry.result if entry is not None and entry.holds_for(tensors) else None

    def put(self, what: Hashable, tensors: Sequence[Tensor], result: Tensor) -> None:
        """Keep ``result``, to which no other code may write, for as long as ``tensors`` live."""
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

    def get_copy(self, what: Hashable, tensors: Sequence[Tensor]) -> Tensor | None:
        """As `get`, for callers who may write into what they get: a copy, made on the write."""
        result = self.get(what, tensors)
        return None if result is None else result._lazy_clone()

    def put_copy(self, what: Hashable, tensors: Sequence[Tensor], result: Tensor) -> None:
        """As `put`, of a result that others have as well."""
        # Not in a block of `graphshard.ops`, from which torch makes no copies on write.
        if not result.requires_grad:
            self.put(what, tensors, result.clone())

    def __len__(self) -> int:
        return len(self._entries)
