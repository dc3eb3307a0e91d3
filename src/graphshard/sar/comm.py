# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.comm``: groups, and lists with a tensor for each rank."""

from ..comm import all_reduce as all_reduce
from ..comm import gather_grads as gather_grads
from ..comm import initialize_comms as initialize_comms
from ..comm import is_initialized as is_initialized
from ..comm import nfs_ip_init as nfs_ip_init
from ..comm import rank as rank
from ..comm import shutdown_comms as shutdown_comms
from ..comm import sync_params as sync_params
from ..comm import world_size as world_size
from ._tensor_lists import all_to_all as all_to_all
from ._tensor_lists import backend as backend
from ._tensor_lists import comm_device as comm_device
from ._tensor_lists import exchange_single_tensor as exchange_single_tensor
from ._tensor_lists import exchange_tensors as exchange_tensors

# One exchange serves every backend, in as many rounds as `Config.max_collective_size` asks for.
all_to_all_rounds = all_to_all_gloo_support = all_to_all


def dump_ip_address(ip_file: str) -> str:
    """Write this host's address to a file, and return it: rank 0's part of `nfs_ip_init`."""
    return nfs_ip_init(0, ip_file)


def get_ip_address(ip_file: str) -> str:
    """Wait for the file that `dump_ip_address` writes, and return the address in it."""
    return nfs_ip_init(1, ip_file)
