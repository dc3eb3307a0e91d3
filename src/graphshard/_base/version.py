# SPDX-License-Identifier: Apache-2.0
"""The version of the package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("graphshard")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0+unknown"
