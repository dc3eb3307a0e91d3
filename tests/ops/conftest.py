# SPDX-License-Identifier: Apache-2.0
"""Every operator test runs with the compiled kernels, without them, and as Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ops_cases import interpreted_triton

from graphshard._base.kernels import force_extension
from graphshard.ops._dispatch import force_triton


@pytest.fixture(
    params=[
        pytest.param("kernels", marks=pytest.mark.compiled),
        "torch",
        pytest.param("triton", marks=pytest.mark.exhaustive),
    ]
)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "triton":
        interpreted_triton()
        from triton_bounds import bounds_checked

        with force_triton(), bounds_checked():
            yield request.param
        return
    with force_extension(request.param == "kernels"):
        yield request.param
