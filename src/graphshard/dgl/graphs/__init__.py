# SPDX-License-Identifier: Apache-2.0
"""DGL's library of functions on graphs: what neither training nor partitioning calls."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

SourceNodes: TypeAlias = int | Sequence[int] | torch.Tensor
