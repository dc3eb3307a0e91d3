# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.optim``: optimizers of embeddings that live on servers."""

from ..servers import SparseAdagrad as SparseAdagrad
from ..servers import SparseAdam as SparseAdam
