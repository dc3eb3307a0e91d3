# SPDX-License-Identifier: Apache-2.0
"""Optional packages: imported when needed, with an error that says how to get them."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def require(module: str, install: str, feature: str) -> ModuleType:
    """Import an optional package for a feature that cannot do without it.

    Warnings that the package gives while it is imported for the first time are not ours to fix and
    not the caller's to read, so they are dropped.

    Args:
        module: Dotted name of the module to import.
        install: What ``pip install`` takes, such as ``graphshard[pyg]``.
        feature: What the caller asked for, the subject of the error message.

    Returns:
        The module.

    Raises:
        ImportError: The package is missing or cannot be loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{feature} needs the package {package!r}, which could not be imported ({error}); "
            f'install it with: pip install "{install}"'
        ) from error
