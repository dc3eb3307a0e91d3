# SPDX-License-Identifier: Apache-2.0
"""The token of a job, which servers ask of trainers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

TOKEN, TOKEN_FILE = "GRAPHSHARD_TOKEN", "GRAPHSHARD_TOKEN_FILE"


def read_token() -> str:
    """The token, from the file that ``GRAPHSHARD_TOKEN_FILE`` names, or ``GRAPHSHARD_TOKEN``.

    Raises:
        ValueError: There is none, or others may read the file.
    """
    path = os.environ.get(TOKEN_FILE)
    if path is None:
        if TOKEN not in os.environ:
            raise ValueError(f"there is no token; set {TOKEN_FILE} to a file that holds one")
        return os.environ[TOKEN]
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ValueError(
            f"{path} must be readable by its owner alone (got mode {mode:o}); chmod 600 it, and "
            "make another token"
        )
    return Path(path).read_text(encoding="utf-8").strip()
