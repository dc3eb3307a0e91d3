# SPDX-License-Identifier: Apache-2.0
"""Fused attention over in-edges, forward and backward."""

from ._attention import attend, check_attention, head_products
from .compute import begin_backward, finish, finish_
