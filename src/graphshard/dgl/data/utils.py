# SPDX-License-Identifier: Apache-2.0
"""Names of ``dgl.data.utils``: DGL's binary files without DGL, and small things for data sets.

``save_info`` and ``load_info`` write and read JSON and safetensors, where DGL pickles: reading a
pickle runs what is in it. A file that DGL wrote is refused. ``download`` and ``extract_archive``
work on what is on disk, and say what to get.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Subset

from ..._base.files import (
    open_regular,
    parse_json,
    read_json_regular,
    read_text_regular,
    write_json,
)
from ...data.dataset import MASKS
from ...errors import GraphTypeError, GraphValueError
from ...graph import load_graphs, load_labels, load_tensors, save_graphs, save_tensors

__all__ = [
    "Subset", "add_nodepred_split", "check_sha1", "download", "extract_archive",
    "get_download_dir", "load_graphs", "load_info", "load_labels", "load_tensors", "loadtxt",
    "save_graphs", "save_info", "save_tensors", "split_dataset",
]  # fmt: skip


_MARK = "__graphshard__"


def save_info(path: str | os.PathLike[str], info: Mapping[str, Any]) -> None:
    """Write a dictionary of plain values, tensors and arrays, without pickle.

    Without tensors the file is JSON. With tensors it is a safetensors file that has the JSON among
    its metadata.

    Args:
        info: Numbers, strings, None, tensors, arrays, and lists and dictionaries of those.
            Tuples are read back as lists, NumPy's numbers as Python's.

    Raises:
        TypeError: Another value.
    """
    tensors: dict[str, Tensor] = {}
    plain = {key: _written(value, tensors) for key, value in info.items()}
    try:
        text = json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GraphTypeError(
            f"info must be made of numbers, strings, tensors, lists and dictionaries ({error})"
        ) from None
    if tensors:
        save_file(tensors, os.fspath(path), metadata={_MARK: text})
    else:
        Path(path).unlink(missing_ok=True)
        write_json(Path(path), plain)


def load_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save_info` wrote.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is none of these, as where DGL wrote it.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")  # of a safetensors file's header
        if 8 + size <= os.path.getsize(path):
            with safe_open(os.fspath(path), "pt") as stored:
                content = parse_json((stored.metadata() or {}).get(_MARK, ""))
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        else:
            content = read_json_regular(path)
        if not isinstance(content, dict):
            raise ValueError("it holds no dictionary")
        return {key: _read(value, tensors) for key, value in content.items()}
    except (ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
        raise GraphValueError(
            f"{os.fspath(path)} is not what save_info writes ({error}); DGL's are pickles, which "
            "are not read: save it again"
        ) from None


def _written(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON has it; tensors are put aside."""
    if isinstance(value, Tensor | np.ndarray):
        kind, name = "tensor" if isinstance(value, Tensor) else "array", str(len(tensors))
        tensors[name] = torch.as_tensor(value).detach().cpu().contiguous().clone()
        return {_MARK: [kind, name]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_written(item, tensors) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _MARK for key in value):
            return {key: _written(item, tensors) for key, item in value.items()}
        pairs = [[_written(k, tensors), _written(v, tensors)] for k, v in value.items()]
        return {_MARK: ["pairs", pairs]}
    return value


def _read(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_read(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: _read(item, tensors) for key, item in value.items()}
    kind, content = value[_MARK]
    if kind == "pairs":
        return {_read(k, tensors): _read(v, tensors) for k, v in content}
    return tensors[content] if kind == "tensor" else tensors[content].numpy()


def default_folder() -> Path:
    """Where DGL keeps data sets."""
    return Path(os.environ.get("DGL_DOWNLOAD_DIR") or os.path.expanduser("~/.dgl"))


def get_download_dir() -> str:
    """The folder of data sets, which is made: ``DGL_DOWNLOAD_DIR``, else ``~/.dgl``."""
    default_folder().mkdir(parents=True, exist_ok=True)
    return str(default_folder())


def _get_dgl_url(file_url: str) -> str:
    """The URL of a file of DGL's; ``DGL_REPO`` of the environment stands for its server."""
    return os.environ.get("DGL_REPO", "https://data.dgl.ai/").rstrip("/") + "/" + file_url


def download(
    url: str,
    path: str | os.PathLike[str] | None = None,
    overwrite: bool = True,
    sha1_hash: str | None = None,
    retries: int = 5,
    verify_ssl: bool = True,
    log: bool = True,
) -> str:
    """The file of a URL, which must lie on disk already: nothing is downloaded.

    Raises:
        FileNotFoundError: It is not there; the error says what to get, and where it belongs.
        ValueError: It has another hash, or the name of the file cannot be told from the URL.
    """
    name = url.split("/")[-1]
    file = name if path is None else os.path.expanduser(path)
    if os.path.isdir(file):
        file = os.path.join(file, name)
    if not file:
        raise GraphValueError(f"the name of the file cannot be told from {url!r}: give a path")
    if not os.path.isfile(file):
        raise FileNotFoundError(
            f"nothing is downloaded: get {url} and put it at {os.path.abspath(file)}"
        )
    if sha1_hash and not check_sha1(file, sha1_hash):
        raise GraphValueError(f"{file} does not have the SHA-1 {sha1_hash}: get {url} again")
    return file


def check_sha1(filename: str | os.PathLike[str], sha1_hash: str) -> bool:
    """Whether a file has that SHA-1."""
    digest = hashlib.sha1(usedforsecurity=False)
    with open_regular(filename) as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest() == sha1_hash


def extract_archive(
    file: str | os.PathLike[str], target_dir: str | os.PathLike[str], overwrite: bool = False
) -> None:
    """Unpack a ``.zip``, ``.tar``, ``.tar.gz``, ``.tgz`` or ``.gz`` file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Another kind of file, a damaged one, or one that would write elsewhere.
    """
    name, target = os.fspath(file), Path(target_dir)
    if target.exists() and not overwrite:
        return
    if not os.path.isfile(name):
        raise FileNotFoundError(f"nothing is downloaded: put the archive at {name}")
    try:
        if name.endswith((".tar.gz", ".tar", ".tgz")):
            with tarfile.open(name) as archive:
                for member in archive.getmembers():
                    if not (member.isfile() or member.isdir()):
                        raise ValueError(f"{member.name} is neither a file nor a folder")
                    _check_inside(member.name)
                target.mkdir(parents=True, exist_ok=True)
                archive.extractall(target, **_TAR_FILTER)
        elif name.endswith(".gz"):
            target.mkdir(parents=True, exist_ok=True)
            with gzip.open(name) as source, open(target / Path(name).stem, "wb") as unpacked:
                shutil.copyfileobj(source, unpacked)
        elif name.endswith(".zip"):
            with zipfile.ZipFile(name) as packed:
                for inside in packed.namelist():
                    _check_inside(inside)
                target.mkdir(parents=True, exist_ok=True)
                packed.extractall(target)
        else:
            raise ValueError("it must end in .zip, .tar, .tar.gz, .tgz or .gz")
    except (ValueError, EOFError, tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile) as error:
        raise GraphValueError(f"{name} cannot be unpacked ({error})") from None


_TAR_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def _check_inside(name: str) -> None:
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise ValueError(f"{name} lies outside the folder")


def loadtxt(path: str | os.PathLike[str], delimiter: str, dtype: Any = None) -> np.ndarray:
    """A table of numbers, ``[num_rows, num_columns]``: int64 if all are whole, else float64."""
    text = read_text_regular(path)
    if dtype is None:
        dtype = np.float64 if re.search(r"[.eEnN]", text) else np.int64
    return np.loadtxt(text.splitlines(), delimiter=delimiter, dtype=dtype, ndmin=2)


def split_dataset(
    dataset: Any,
    frac_list: Sequence[float] | None = None,
    shuffle: bool = False,
    random_state: int | None = None,
) -> list[Subset[Any]]:
    """Split a data set into parts."""
    shares = np.asarray([0.8, 0.1, 0.1] if frac_list is None else frac_list, dtype=float)
    if not np.allclose(shares.sum(), 1.0):
        raise GraphValueError(f"frac_list must be together 1 (got {shares.sum():.4f})")
    sizes = (len(dataset) * shares).astype(int)
    sizes[-1] = len(dataset) - sizes[:-1].sum()
    order = np.arange(len(dataset))
    if shuffle:
        order = np.random.RandomState(random_state).permutation(len(dataset))
    parts: Any = np.split(order, sizes.cumsum()[:-1])
    return [Subset(dataset, part) for part in parts]


def add_nodepred_split(dataset: Any, ratio: Sequence[float], ntype: str | None = None) -> None:
    """Give the nodes of each graph ``train_mask``, ``val_mask`` and ``test_mask``, at random."""
    if len(ratio) != 3:
        raise GraphValueError(f"ratio must have three numbers (got {ratio!r})")
    for number in range(len(dataset)):
        g = dataset[number]
        count = g.num_nodes(ntype)
        for mask, ids in zip(MASKS, three_sets(count, ratio), strict=True):
            g.nodes[ntype].data[mask] = generate_mask_tensor(idx2mask(ids, count))


def three_sets(count: int, ratio: Sequence[float]) -> list[np.ndarray]:
    """Numbers from 0 in random order, by NumPy's generator, split in three."""
    stops = [int(count * ratio[0])]
    return np.split(np.random.permutation(count), [*stops, stops[0] + int(count * ratio[1])])


def idx2mask(idx: Any, len: int) -> np.ndarray:
    """An array of zeros with ones at some places."""
    mask = np.zeros(len)
    mask[idx] = 1
    return mask


def generate_mask_tensor(mask: np.ndarray) -> Tensor:
    """A bool tensor of an array."""
    if not isinstance(mask, np.ndarray):
        raise GraphTypeError(f"mask must be a NumPy array (got {type(mask).__name__})")
    return torch.from_numpy(mask.astype(bool))


def makedirs(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it, where they are not there."""
    os.makedirs(os.path.expanduser(os.path.normpath(path)), exist_ok=True)
