# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.config``."""

from .._base.config import Config as Config
