# SPDX-License-Identifier: Apache-2.0
"""Which part each node goes to, and in which order within it."""

from ._assign import Assignment, BalanceWarning, PartMethod, assign_nodes
from ._constraints import BalanceNTypes, Constraint, build_constraints
from ._metis import Objective, metis_available, metis_partition
from ._order import order_nodes
from ._repair import part_loads
from ._undirected import UndirectedGraph
