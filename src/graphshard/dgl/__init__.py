# SPDX-License-Identifier: Apache-2.0
"""The names of DGL: ``import graphshard.dgl as dgl``.

What exists only because DGL has it is written here: its library of functions on graphs, its data
sets, layers, samplers, and the modules from which its scripts import. All else is the package's
own, under DGL's names. Arguments mean what DGL's documentation says of them: docstrings here give
shapes, sources and errors, and say of an argument what is not there. Nothing outside imports this
package but `graphshard.sar`.
"""

from .. import __version__ as __version__
from ..errors import DGLError as DGLError
from ..graph import ALL as ALL
from ..graph import EID as EID
from ..graph import ETYPE as ETYPE
from ..graph import NID as NID
from ..graph import NTYPE as NTYPE
from ..graph import Block as Block
from ..graph import EdgeBatch as EdgeBatch
from ..graph import Graph as Graph
from ..graph import NodeBatch as NodeBatch
from ..graph import create_block as create_block
from ..graph import edge_subgraph as edge_subgraph
from ..graph import from_dgl as from_dgl
from ..graph import from_edge_index as from_edge_index
from ..graph import from_networkx as from_networkx
from ..graph import from_scipy as from_scipy
from ..graph import graph as graph
from ..graph import heterograph as heterograph
from ..graph import in_subgraph as in_subgraph
from ..graph import load_graphs as load_graphs
from ..graph import node_subgraph as node_subgraph
from ..graph import out_subgraph as out_subgraph
from ..graph import save_graphs as save_graphs
from ..graph import to_dgl as to_dgl
from ..graph import to_edge_index as to_edge_index
from ..graph import to_heterogeneous as to_heterogeneous
from ..graph import to_homogeneous as to_homogeneous
from ..graph import to_networkx as to_networkx
from ..graph import to_scipy as to_scipy
from ..sampling import set_dst_lazy_features as set_dst_lazy_features
from ..sampling import set_edge_lazy_features as set_edge_lazy_features
from ..sampling import set_node_lazy_features as set_node_lazy_features
from ..sampling import set_src_lazy_features as set_src_lazy_features
from . import backend as backend
from . import base as base
from . import data as data
from . import dataloading as dataloading
from . import distributed as distributed
from . import function as function
from . import init as init
from . import nn as nn
from . import ops as ops
from . import optim as optim
from . import sampling as sampling
from . import transforms as transforms
from . import utils as utils
from ._graph_methods import add_methods
from ._patch_dgl import patch_dgl as patch_dgl
from ._patch_dgl import patched_edge_softmax as patched_edge_softmax
from ._patch_dgl import unpatch_dgl as unpatch_dgl
from ._places import add_modules
from .graphs._batch import *  # noqa: F403
from .graphs._bipartite import *  # noqa: F403
from .graphs._edgewise import *  # noqa: F403
from .graphs._neighborhoods import *  # noqa: F403
from .graphs._orders import *  # noqa: F403
from .graphs._propagate import *  # noqa: F403
from .graphs._random import *  # noqa: F403
from .graphs._readout import *  # noqa: F403
from .transforms.functional import *  # noqa: F403
from .transforms.module import *  # noqa: F403
from .unedited import load_ipython_extension as load_ipython_extension
from .utils import apply_each as apply_each
from .utils import is_libxsmm_enabled as is_libxsmm_enabled
from .utils import use_libxsmm as use_libxsmm

DGLGraph = DGLHeteroGraph = Graph
DGLBlock = Block
add_methods()
add_modules(__name__)
