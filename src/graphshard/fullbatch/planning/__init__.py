# SPDX-License-Identifier: Apache-2.0
"""From calls of the message-passing protocol to passes over shards."""

from ._plan import RelationFields
from ._planner import Planner
