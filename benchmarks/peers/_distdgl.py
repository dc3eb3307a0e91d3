# SPDX-License-Identifier: Apache-2.0
"""How a program that two_hosts.sh starts becomes a server or trainer of DistDGL."""

import os
from types import ModuleType


def start(parts: str) -> ModuleType:
    """DGL, connected; a server never comes back.

    Args:
        parts: The JSON of the partition.
    """
    os.environ |= {
        "DGL_ROLE": "server" if os.environ["ROLE"] == "server" else "client",
        "DGL_SERVER_ID": os.environ["HOST"],
        "DGL_CONF_PATH": parts,
        "DGL_IP_CONFIG": os.environ["IP_CONFIG"],
        "DGL_DIST_MODE": "distributed",
        "DGL_NUM_SAMPLER": "0",
        "DGL_NUM_CLIENT": "2",
        "DGL_NUM_SERVER": "1",
        "DGL_GRAPH_FORMAT": "csc",
        "DGL_KEEP_ALIVE": "0",
        "DGLBACKEND": "pytorch",
    }
    import dgl
    import torch

    torch.set_num_threads(1)
    dgl.distributed.initialize(os.environ["IP_CONFIG"])
    torch.distributed.init_process_group("gloo")
    return dgl
