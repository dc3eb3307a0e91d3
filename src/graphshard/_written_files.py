# SPDX-License-Identifier: Apache-2.0
"""Writing files: an error that names the file, and what to do about it.

Of a write that fails, the system's error tells the reason ("No space left on device") and nothing
else: which file, on which disk, only the writer knows.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

_CURES = {
    errno.ENOSPC: "make room on that disk, or write to another",
    errno.EDQUOT: "make room within your quota, or write to another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or write to another file system",
}
_CURE = "check that disk, or write to another"


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write a file in here: an `OSError` that names no file becomes one that names ``path``.

    Raises:
        OSError: With the same ``errno``, such as ``ENOSPC``.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # of opening or renaming: it says which file
            raise
        reason = error.strerror or str(error)
        cure = _CURES.get(error.errno or 0, _CURE)
        text = f"{os.fspath(path)} cannot be written ({reason}); {cure}"
        raise (OSError(text) if error.errno is None else OSError(error.errno, text)) from error
