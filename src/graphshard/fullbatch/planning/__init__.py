# SPDX-License-Identifier: Apache-2.0
"""From calls of the message-passing protocol to passes."""

from ._calls import RelationFields
from ._oneshot import OneShot
from ._sequential import Sequential
