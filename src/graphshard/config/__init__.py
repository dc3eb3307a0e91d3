# SPDX-License-Identifier: Apache-2.0
"""Defaults of a process, at SAR's place: ``sar.config``."""

from ._config import Config

__all__ = ["Config"]
