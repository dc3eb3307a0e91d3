# SPDX-License-Identifier: Apache-2.0
"""What all checkpoints have in common: folders that are whole or not there, digests, a lock."""

from ...comm.collectives import text_of_rank_0
from ._folder import (
    SHARED,
    CheckpointNames,
    check_shared,
    everywhere,
    on_rank_0,
    rank_file,
    remove,
    write_whole,
)
from ._lock import LOCK_FILE, RunLock
from ._sealed import (
    DamagedError,
    check_positive,
    check_record,
    digest_of_content,
    json_object,
    open_checked,
    read_checked,
    read_sealed,
    records_of,
    write_sealed,
)
