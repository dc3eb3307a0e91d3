# SPDX-License-Identifier: Apache-2.0
"""Process groups: how ranks meet, what is known of a group, who notices that a rank fails."""

from ._address import JOB_VARIABLE, local_environment, nfs_ip_init
from ._failure import NOTICE, rank_names
from ._machine import machine_name, process_namespace
from ._meeting import come_together
from ._rendezvous import host_store
from ._start import guard, initialize_comms, report_failure, shutdown_comms
from ._state import (
    HOST_BACKENDS,
    THREAD_GROUP,
    GroupState,
    alone,
    close_in_children,
    forget,
    group_state,
    is_initialized,
    operation,
    rank,
    register,
    registered,
    world_size,
)
