# SPDX-License-Identifier: Apache-2.0
"""Files of others, opened with care; own files, written whole, or mapped by several processes.

And folders that go with their process. Standard library alone, so that a process that only watches
others need not load torch.
"""

from .mapped import MappedFile
from .pickled import PickleMachine
from .regular import (
    NotRegularFileError,
    check_regular,
    open_regular,
    parse_json,
    read_json_regular,
    read_text_regular,
)
from .temporary import TemporaryFolder, remove_abandoned, shared_memory_folder
from .written import check_path, check_text, sync_folder, write_json, writing

__all__ = [
    "MappedFile",
    "NotRegularFileError",
    "PickleMachine",
    "TemporaryFolder",
    "check_path",
    "check_regular",
    "check_text",
    "open_regular",
    "parse_json",
    "read_json_regular",
    "read_text_regular",
    "remove_abandoned",
    "shared_memory_folder",
    "sync_folder",
    "write_json",
    "writing",
]
