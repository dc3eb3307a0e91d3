# SPDX-License-Identifier: Apache-2.0
"""Where neighbours come from: a local graph, this rank's part, the whole in shared memory."""

from ._choose import Transport, choose_structure
from ._collective import CollectiveStructure
from ._replicated import ReplicatedStructure
from ._structure import Drawn, DrawOptions, HopRequest, LocalStructure, Structure
from ._structures import structure_of
