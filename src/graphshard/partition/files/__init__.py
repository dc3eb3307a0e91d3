# SPDX-License-Identifier: Apache-2.0
"""The two kinds of files of a partition: tensors with digests, JSON with checked entries."""

from ._files import DTYPE_NAMES, FileRecord, Rows, RowSource, TensorFile, digest_of, write_tensors
from .entries import (
    GRAPH_FORMATS,
    PART_FILES,
    PartFile,
    etype_key,
    listing,
    mapping,
    required,
    shown,
    text,
    whole_number,
)
