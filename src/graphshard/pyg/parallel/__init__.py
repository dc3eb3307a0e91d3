# SPDX-License-Identifier: Apache-2.0
"""A model whose calls take whole tensors and compute on shards."""

from ._parallelize import parallelize
