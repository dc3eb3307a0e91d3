# SPDX-License-Identifier: Apache-2.0
"""Which cases of a product of options run always, and which only in ``make test-all``.

A sample that holds every pair of values finds whatever one value, or two together, break; the whole
product is for what needs three. Cases outside the sample carry the marker ``exhaustive``, which the
tests' ``conftest.py`` deselects unless pytest is given ``--all``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Case = tuple[Any, ...]


def pairwise(product: Sequence[Case]) -> list[Case]:
    """A few of the cases in which every pair of values stands that stands in the product.

    Greedy: the case with most pairs that are still missing, the first of several.

    Args:
        product: Cases, all of the same length; what they leave out is left out.
    """
    pairs = {case: set(_pairs(case)) for case in product}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(product, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def _pairs(case: Case) -> list[Any]:
    return [
        ((i, case[i]), (j, case[j])) for i, j in itertools.combinations(range(len(case)), 2)
    ] or [case]


def sampled(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[Any]:
    """The product of the axes for ``pytest.mark.parametrize``; its pairwise sample runs always.

    Args:
        axes: The values of each parameter, in the order of the parameters' names.
        allowed: Called with the values of a case; whether there is such a case.
    """
    product = [case for case in itertools.product(*axes) if allowed(*case)]
    chosen = set(pairwise(product))
    return [
        pytest.param(*case, marks=[] if case in chosen else pytest.mark.exhaustive)
        for case in product
    ]
