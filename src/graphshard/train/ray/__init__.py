# SPDX-License-Identifier: Apache-2.0
"""Training on graph servers under Ray Train; needs ``graphshard[ray]``."""

from ._trainer import trainer

__all__ = ["trainer"]
