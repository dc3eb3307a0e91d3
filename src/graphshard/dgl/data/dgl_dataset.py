# SPDX-License-Identifier: Apache-2.0
"""DGLDataset, DGLBuiltinDataset: what data sets of DGL are built on, for subclasses of users.

Nothing is downloaded here: what a data set reads lies in a folder already, or an error says which
files belong where. A subclass may define ``download`` and get them itself.
"""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import DGLError
from ...graph import Graph, load_graphs
from .utils import _get_dgl_url as get_dgl_url
from .utils import default_folder, extract_archive


class DGLDataset:
    """Base of data sets; making one loads it.

    If `has_cache` says so, `load` reads what an earlier run has saved. Otherwise `download` is
    called, unless ``raw_path`` exists; then `process`, which makes the data out of raw files, and
    `save`. A subclass defines `process`, ``__getitem__`` and ``__len__``, and the others as needed.

    Args:
        raw_dir: Folder of raw files; by default ``DGL_DOWNLOAD_DIR`` of the environment, else
            ``~/.dgl``.

    Example:
        >>> from graphshard.graph import graph
        >>> class Triangle(DGLDataset):
        ...     def __init__(self):
        ...         super().__init__(name="triangle")
        ...     def process(self):
        ...         self.graph = graph(([0, 1, 2], [1, 2, 0]))
        ...     def __getitem__(self, idx):
        ...         return self.graph
        ...     def __len__(self):
        ...         return 1
        >>> Triangle()[0].num_edges()
        3
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        raw_dir: str | os.PathLike[str] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        hash_key: Any = (),
        force_reload: bool = False,
        verbose: bool = False,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        self._name, self._url = name, url
        self._force_reload, self._verbose = force_reload, verbose
        self._hash_key, self._hash = hash_key, _digest(str(hash_key))
        self._transform = transform
        self._raw_dir = str(default_folder() if raw_dir is None else raw_dir)
        self._save_dir = self._raw_dir if save_dir is None else str(save_dir)
        self._load()

    def download(self) -> None:
        """Get the raw files; nothing by default."""

    def process(self) -> None:
        """Make the data out of raw files."""
        raise NotImplementedError(f"{type(self).__name__} must define process(self)")

    def save(self) -> None:
        """Save what `process` made; nothing by default."""

    def load(self) -> None:
        """Read what `save` wrote; nothing by default."""

    def has_cache(self) -> bool:
        """Whether there is something to `load`."""
        return False

    def __getitem__(self, idx: int) -> Any:
        """The item of that number."""
        raise NotImplementedError(f"{type(self).__name__} must define __getitem__(self, idx)")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__(self)")

    def _load(self) -> None:
        if not self._force_reload and self.has_cache():
            try:
                self.load()
            except Exception:
                self._say(f"{traceback.format_exc()}Loading from cache failed, re-processing.")
            else:
                self._say("Done loading data from cached files.")
                return
        if not os.path.exists(self.raw_path) and type(self).download is not DGLDataset.download:
            os.makedirs(self.raw_dir, exist_ok=True)
            self.download()
        self.process()
        self.save()

    def _say(self, text: str) -> None:
        if self._verbose:
            print(text)  # noqa: T201 (what verbose asks for)

    def _transformed(self, graph: Graph) -> Any:
        return graph if self._transform is None else self._transform(graph)

    @property
    def url(self) -> str | None:
        return self._url

    @property
    def name(self) -> str:
        return self._name

    @property
    def raw_dir(self) -> str:
        return self._raw_dir

    @property
    def raw_path(self) -> str:
        """The folder of raw files, named by the data set and a digest of its URL if it has one."""
        return os.path.join(self.raw_dir, self._folder_name())

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def save_path(self) -> str:
        """Folder for what is saved."""
        return os.path.join(self.save_dir, self._folder_name())

    @property
    def verbose(self) -> bool:
        return self._verbose

    @property
    def hash(self) -> str:
        """Digest of ``hash_key``."""
        return self._hash

    def _folder_name(self) -> str:
        return self.name if self._url is None else f"{self.name}_{_digest(self._url)}"

    def __repr__(self) -> str:
        return f'Dataset("{self.name}", num_graphs={len(self)}, save_path={self.save_path})'


class OneGraph(DGLDataset):
    """Base of those that have one graph, in ``_g``."""

    _g: Graph

    def __getitem__(self, idx: int) -> Any:
        if idx != 0:
            raise DGLError(f"this data set has only one graph, number 0 (got {idx})")
        return self._transformed(self._g)

    def __len__(self) -> int:
        return 1


class DGLBuiltinDataset(DGLDataset):
    """Base of data sets that DGL downloads; here their files must lie in ``raw_dir`` already.

    Raises:
        FileNotFoundError: The files are not there; the error says what belongs where.
        ValueError: A damaged file; for some, an unknown name or mode.
    """

    def __init__(
        self,
        name: str,
        url: str | None,
        raw_dir: str | os.PathLike[str] | None = None,
        hash_key: Any = (),
        force_reload: bool = False,
        verbose: bool = False,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        super().__init__(name, url, raw_dir, None, hash_key, force_reload, verbose, transform)

    def download(self) -> None:
        """Say where the files belong, as nothing is downloaded."""
        if self.url is not None:
            raise FileNotFoundError(
                f"{self.name} is not downloaded: get {self.url} and unpack it into {self.raw_path}"
            )


class LocalDataset(DGLBuiltinDataset):
    """Base of the data sets here that DGL would download: reads local files, and saves nothing.

    Files are looked for in ``raw_dir`` and in folders in it that have the name of the data set, or
    the one that DGL gives them (``cora_v2_d697a464``).
    """

    def download(self) -> None:
        """Nothing; `_folder_with` says what to get."""

    def _load(self) -> None:
        self.process()

    def _folder_with(
        self, *file_sets: Sequence[str], folder_names: Sequence[str] | None = None
    ) -> Path:
        """The folder that holds one of several sets of files.

        See `find_folder`; an archive of DGL's that lies in ``raw_dir`` is unpacked.

        Raises:
            FileNotFoundError: There is none; the error says what to get, and where it belongs.
        """
        names = [self.name] if folder_names is None else folder_names
        folder = find_folder(self.raw_dir, names, file_sets)
        if folder is None and self.url is not None:
            suffix = Path(self.url).suffix
            for archive in {Path(self.url).name, self.name + suffix, names[0] + suffix}:
                packed = Path(self.raw_dir) / archive
                if suffix in (".zip", ".tgz") and packed.is_file():
                    extract_archive(packed, Path(self.raw_dir) / names[0], overwrite=True)
                    folder = find_folder(self.raw_dir, names, file_sets)
        if folder is None:
            source = "" if self.url is None else f"get {self.url}, and "
            raise FileNotFoundError(
                f"{self.name} is not downloaded: {source}put {' and '.join(file_sets[0])} into "
                f"{Path(self.raw_dir) / names[0]}"
            )
        return folder


class OneGraphDataset(OneGraph, LocalDataset):
    """Base of local data sets that have one graph."""


class RawOrSavedDataset(OneGraphDataset):
    """Base of those that are in raw files, or in the file that DGL has saved.

    A subclass has a name, ``_title``, and makes a graph of its raw files, which ``_raw`` names.
    """

    _title = ""
    _raw: Sequence[str] = ()
    _saved = "dgl_graph.bin"

    def __init__(
        self,
        raw_dir: str | os.PathLike[str] | None = None,
        force_reload: bool = False,
        verbose: bool = False,
        transform: Callable[[Graph], Any] | None = None,
    ) -> None:
        url = get_dgl_url(f"dataset/{self._title}.zip")
        super().__init__(self._title, url, raw_dir, (), force_reload, verbose, transform)

    def process(self) -> None:
        raw = [file.format(self.name) for file in self._raw]
        folder = self._folder_with(raw, *([] if self._force_reload else [[self._saved]]))
        files = [folder / file for file in raw]
        is_raw = all(map(Path.is_file, files))
        self._g = self._from_raw(*files) if is_raw else saved_graph(folder / self._saved)
        self._say(f"{self.name}: {self._g.num_nodes()} nodes, {self._g.num_edges()} edges")

    def _from_raw(self, *files: Path) -> Graph:
        raise NotImplementedError


def saved_graph(path: Path) -> Graph:
    """What DGL has saved; its masks as bool."""
    g: Graph = load_graphs(str(path))[0][0]
    for name in list(g.ndata):
        if name.endswith("_mask"):
            g.ndata[name] = g.ndata[name].bool()
    return g


def find_folder(
    raw_dir: str, names: Sequence[str], file_sets: Sequence[Sequence[str]]
) -> Path | None:
    """The folder that holds one of several sets of files, or None.

    Looked at are ``raw_dir`` itself, and in it those folders that have one of the names, or one of
    them with ``_`` and a digest after it, as DGL names them; then folders of these names in those.
    """
    root = Path(raw_dir)
    if not root.is_dir():
        return None
    inside = sorted(path for path in root.iterdir() if path.is_dir())
    named = [path for path in inside if {path.name, path.name.rsplit("_", 1)[0]} & set(names)]
    for folder in (root, *named, *(path / name for path in named for name in names)):
        if any(all((folder / file).is_file() for file in files) for files in file_sets):
            return folder
    return None


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:8]
