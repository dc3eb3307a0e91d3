# SPDX-License-Identifier: Apache-2.0
"""The command ``graphshard``. Commands name functions of the library; they compute nothing."""

from ._app import app, main, run

__all__ = ["app", "main", "run"]
