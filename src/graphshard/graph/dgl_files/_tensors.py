# SPDX-License-Identifier: Apache-2.0
"""Files of named tensors, as ``dgl.data.utils.save_tensors`` writes them.

::

    u64 0xDD5A9FBE3FA2443F, u64 tensors, u64 tensors, and for each of them a text and the tensor

So says DGL's ``src/graph/serialize/tensor_serialize.cc``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..._base.files import check_text
from ..._base.typing import TensorDict
from ._binary import BinaryReader, DamagedFileError, StoredTensor, dgl_dtype, new_file, reading

TENSORS = 0xDD5A9FBE3FA2443F

TensorPieces = Mapping[str, tuple[torch.dtype, tuple[int, ...], Iterable[Tensor]]]


def save_tensors(filename: str | os.PathLike[str], tensor_dict: Mapping[str, Tensor]) -> bool:
    """Write named tensors as ``dgl.data.utils.save_tensors`` does, without DGL.

    Args:
        filename: File to write; one that is there is replaced, its folder is made if need be.
        tensor_dict: Name to tensor, on any device. DGL's files know no bool: it becomes uint8.

    Returns:
        True, as DGL's function does.

    Raises:
        TypeError: A name is no text, a value no tensor, or of a dtype that DGL's files cannot hold.
        ValueError: ``filename`` is a folder.
        OSError: The file cannot be written, such as on a full disk; names it.

    Example:
        >>> save_tensors("rows.dgl", {"x": torch.ones(2, 3)})
        True
        >>> load_tensors("rows.dgl")["x"].shape
        torch.Size([2, 3])
    """
    check_tensors(tensor_dict, "tensor_dict")
    write_tensor_file(
        filename,
        {name: (t.dtype, tuple(t.shape), (t,)) for name, t in tensor_dict.items()},
    )
    return True


def load_tensors(filename: str | os.PathLike[str], return_dgl_ndarray: bool = False) -> TensorDict:
    """Read a file that ``save_tensors``, DGL's or ours, wrote; without DGL.

    Args:
        filename: The file.
        return_dgl_ndarray: Must be false: there are no DGL arrays without DGL.

    Returns:
        Name to tensor, in the order of the file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or no such file.
        NotImplementedError: ``return_dgl_ndarray`` is true.
    """
    if return_dgl_ndarray:
        raise NotImplementedError("return_dgl_ndarray=True needs DGL; leave it out for tensors")
    with reading(filename) as reader:
        return {name: stored.read() for name, stored in open_tensors(reader).items()}


def open_tensors(reader: BinaryReader) -> dict[str, StoredTensor]:
    """The tensors of an open file, after a walk through all of it."""
    reader.magic(TENSORS, "a file of tensors")
    said = reader.u64()
    found = reader.named_tensors()
    if len(found) != said:
        raise DamagedFileError(f"it says {said} tensors and then {len(found)}")
    if reader.left:
        raise DamagedFileError(f"{reader.left} bytes follow its tensors")
    return found


def write_tensor_file(filename: str | os.PathLike[str], tensors: TensorPieces) -> None:
    """Write tensors whose rows come in pieces.

    Args:
        filename: The file.
        tensors: Name to dtype, shape, and the rows in order.
    """
    with new_file(filename) as writer:
        writer.u64(TENSORS, len(tensors), len(tensors))
        for name, (dtype, shape, pieces) in tensors.items():
            writer.text(name)
            writer.tensor(dtype, shape, pieces)


def check_tensors(tensors: object, what: str) -> None:
    """Raise unless they are named tensors that DGL's files can hold.

    Raises:
        TypeError: They are not.
        ValueError: UTF-8 cannot hold a name.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{what} must be a dict of tensors (got {type(tensors).__name__})")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the keys of {what} must be texts (got {name!r:.80})")
        check_text(name, f"a name in {what}")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(
                f"{what}[{name!r}] must be a dense tensor (got {type(tensor).__name__})"
            )
        dgl_dtype(tensor.dtype)
