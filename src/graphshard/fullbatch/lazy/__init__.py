# SPDX-License-Identifier: Apache-2.0
"""What is computed later: values of edges as expressions, messages, functions of the user."""

from ._expressions import (
    Apply,
    Dropout,
    EdgeRows,
    Endpoint,
    Expression,
    LazySoftmax,
    Leaf,
    LeafKey,
    Reshape,
    Sddmm,
    ShardEvaluation,
    ShiftedSoftmax,
    distinct,
    leaves_of,
    substitute,
    walk,
)
from ._lazy_tensor import DeferredEdges, expression_of
from ._messages import Adjoint, CopySource, Message, PerEdge, Weighted
from ._user_functions import UserFunction, UserMessage, message_has_parameters
