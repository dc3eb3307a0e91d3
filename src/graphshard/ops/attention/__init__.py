# SPDX-License-Identifier: Apache-2.0
"""Fused attention over in-edges, forward and backward."""

from ._affine import affine, is_hooked, is_plain, is_relu, linear
from ._attention import attend, check_attention
from ._finish import begin_backward, finish, finish_
from ._head_products import head_products
