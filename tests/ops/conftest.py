# SPDX-License-Identifier: Apache-2.0
"""Every operator test runs with the compiled kernels and without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphshard._kernel import extension_available, force_extension


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "kernels" and not extension_available():
        pytest.skip("the compiled kernels are not installed")
    with force_extension(request.param == "kernels"):
        yield request.param
