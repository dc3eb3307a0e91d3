# SPDX-License-Identifier: Apache-2.0
"""UndirectedGraph, and METIS through the shared library that the wheel ``cmeel-metis`` carries.

Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs"
(1998) and "Multilevel algorithms for multi-constraint graph partitioning" (1998); time and memory
grow linearly with the edges. The popular Python wrapper, pymetis, knows one balance constraint
only, so it serves as the fallback and the library itself is called through ctypes. Nothing is
loaded before the first call. METIS keeps no state between calls but the C library's random
numbers, so it is called by one thread at a time; other Python threads run while it works.

METIS trusts its input: what it does not like it prints, or worse. So everything is checked here
first, and the one line that it may still print (a bisection ran out of nodes) is caught.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import MetisError
from ..ops import Adjacency

if TYPE_CHECKING:
    import scipy.sparse

# Edges whose numbers fit the cache next to a core.
_SLICE = 1 << 15

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class UndirectedGraph:
    """Neighbours of each node, ascending, in compressed rows.

    Args:
        indptr: ``[num_nodes + 1]``.
        indices: ``[2 * num_edges]``, each edge once from either end.
        counts: As ``indices``: how many directed edges, in both directions, became this one.
            None where that was not counted.
        check: Look at every number; pass False only for arrays that are known to be right.

    Raises:
        ValueError: The arrays are not those of such a graph.
    """

    indptr: IntArray
    indices: IntArray
    counts: IntArray | None = None
    check: InitVar[bool] = True

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices) // 2

    def __post_init__(self, check: bool) -> None:
        """Check everything that METIS would not survive."""
        if not check:
            return
        indptr, indices = self.indptr, self.indices
        if indptr.shape[0] == 0 or indptr[0] != 0 or indptr[-1] != indices.shape[0]:
            raise ValueError("indptr must begin with 0 and end with the length of indices")
        if bool((indptr[1:] < indptr[:-1]).any()):
            raise ValueError("indptr must ascend")
        if self.counts is not None and self.counts.shape != indices.shape:
            raise ValueError("counts must have one entry per entry of indices")
        if indices.shape[0] == 0:
            return
        if indices.min() < 0 or indices.max() >= self.num_nodes:
            raise ValueError(f"indices must be in [0, {self.num_nodes})")
        matrix = self.matrix()
        if matrix.diagonal().any():
            raise ValueError("the graph must have no self loops; remove them first")
        # With random a and b, the sum of a[u] * b[v] over all entries equals that of b[u] * a[v],
        # modulo 2**64, if every edge is there in both directions, and hardly ever otherwise.
        generator = np.random.default_rng(0)
        a, b = generator.integers(0, 2**64, (2, self.num_nodes), dtype=np.uint64)
        if np.dot(a, matrix @ b) != np.dot(b, matrix @ a):
            raise ValueError("every edge must be there in both directions; symmetrise first")

    def matrix(self) -> scipy.sparse.csr_array:
        """As a sparse matrix of ones that shares the index arrays."""
        import scipy.sparse

        return scipy.sparse.csr_array(
            (np.ones(self.indices.shape[0], dtype=np.uint8), self.indices, self.indptr),
            shape=(self.num_nodes, self.num_nodes),
        )

    @classmethod
    def from_edges(
        cls, edges: Iterable[tuple[Tensor, Tensor]], num_nodes: int, *, count: bool = False
    ) -> UndirectedGraph:
        """Forget directions, loops and repetitions.

        Args:
            edges: (source, destination) of each relation, in homogenised ids.
            count: Remember how often each edge was there.

        Raises:
            MetisError: The nodes do not fit 32-bit integers, which METIS needs.
        """
        import scipy.sparse

        if num_nodes >= 2**31 - 1:
            raise MetisError(
                f"METIS and the node order use 32-bit ids: the graph must have fewer than 2**31 "
                f"nodes (got {num_nodes}); bring an assignment as part_method, and reorder=False"
            )
        sources = [none := torch.zeros(0, dtype=torch.int32)]
        targets = [none]
        for src, dst in edges:
            src, dst = src.to(torch.int32).cpu(), dst.to(torch.int32).cpu()
            loops = src == dst
            if bool(loops.any()):
                src, dst = src[~loops], dst[~loops]
            sources.append(src)
            targets.append(dst)
        src = sources[1] if len(sources) == 2 else torch.cat(sources)
        dst = targets[1] if len(targets) == 2 else torch.cat(targets)
        del sources, targets
        dtype = torch.int32 if src.shape[0] < 2**31 else torch.int64
        src, dst = src.to(dtype), dst.to(dtype)
        indptr, indices, eids = Adjacency(src, dst, num_nodes, num_nodes, check=False).csr()
        ones = np.ones(dst.shape[0], dtype=np.int32 if count else np.int8)
        out = scipy.sparse.csr_array(
            (ones, indices.numpy(), indptr.numpy()), shape=(num_nodes, num_nodes)
        )
        whole = eids is None and out.has_canonical_format and _is_symmetric(src, dst, num_nodes)
        del src, dst, ones, indptr, indices, eids
        if whole:
            return cls(out.indptr, out.indices, 2 * out.data if count else None, check=False)
        # Turning a matrix round takes linear time and leaves its rows ascending.
        into = out.T.tocsr()
        if not out.has_canonical_format:
            into.sum_duplicates()
            out = into.T.tocsr()
        if not count:
            out.data[:], into.data[:] = 1, 1  # a sum of 256 would be none at all
        if np.array_equal(out.indptr, into.indptr) and np.array_equal(out.indices, into.indices):
            out.data += into.data
        else:
            out = out + into
        return cls(out.indptr, out.indices, out.data if count else None, check=False)


def _is_symmetric(src: Tensor, dst: Tensor, num_nodes: int) -> bool:
    """Whether every edge is there in both directions, where none is there twice.

    By the sums that `UndirectedGraph` checks, in half of the time that turning the matrix takes.
    """
    generator = np.random.default_rng(0)
    a, b = torch.from_numpy(generator.integers(-(2**63), 2**63, (2, num_nodes)))

    def difference(some: tuple[Tensor, Tensor]) -> int:
        src, dst = some
        there = a.index_select(0, src).dot(b.index_select(0, dst))
        back = b.index_select(0, src).dot(a.index_select(0, dst))
        return int(there) - int(back)

    with ThreadPoolExecutor(max_workers=2) as pool:
        total = sum(pool.map(difference, zip(src.split(_SLICE), dst.split(_SLICE), strict=True)))
    return total % 2**64 == 0


Objective = Literal["cut", "vol"]
Method = Literal["kway", "recursive"]

INSTALL_METIS = "install it with `pip install cmeel-metis`"

_STATUS = {-2: "METIS refused the input", -3: "METIS ran out of memory", -4: "METIS failed"}
_stdout_lock = threading.Lock()
# METIS draws from the C library's one generator: two calls at once would not repeat.
_metis_lock = threading.Lock()


@dataclass(frozen=True)
class MetisLibrary:
    """The loaded library, and what its own header says about it."""

    handle: ctypes.CDLL
    index_type: type[np.signedinteger[Any]]
    real_type: type[np.floating[Any]]
    options: dict[str, int]
    version: tuple[int, ...]


def metis_available() -> bool:
    """Whether METIS can be called with any number of constraints."""
    try:
        return load_metis() is not None
    except MetisError:
        return False


@lru_cache(maxsize=1)
def load_metis() -> MetisLibrary | None:
    """Load METIS; None where its wheel is not installed.

    Raises:
        MetisError: The wheel is there, but its library cannot be used.
    """
    library, header = _find("cmeel-metis", "libmetis"), _find("cmeel-metis", "metis.h")
    if library is None or header is None:
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    try:
        widths = {
            name: int(_search(rf"^\s*#define\s+{name}\s+(\d+)", text))
            for name in ("IDXTYPEWIDTH", "REALTYPEWIDTH")
        }
        version = tuple(
            int(_search(rf"^#define\s+METIS_VER_{part}\s+(\d+)", text))
            for part in ("MAJOR", "MINOR", "SUBMINOR")
        )
        listed = _search(r"typedef\s+enum\s*\{([^}]*)\}\s*moptions_et", text)
    except LookupError as error:
        raise MetisError(f"cannot read {header}: {error}; reinstall cmeel-metis") from None
    if version[0] != 5:
        raise MetisError(f"METIS 5 is needed (got {version}); {INSTALL_METIS}")
    try:
        gklib = _find("cmeel-gklib", "libGKlib")
        if gklib is not None:  # METIS names it as a dependency, and no search path leads to it
            ctypes.CDLL(str(gklib), mode=ctypes.RTLD_GLOBAL)
        handle = ctypes.CDLL(str(library))
    except OSError as error:
        raise MetisError(f"cannot load METIS: {error}; reinstall cmeel-metis") from error
    return MetisLibrary(
        handle,
        np.int64 if widths["IDXTYPEWIDTH"] == 64 else np.int32,
        np.float64 if widths["REALTYPEWIDTH"] == 64 else np.float32,
        {name: place for place, name in enumerate(re.findall(r"METIS_OPTION_(\w+)", listed))},
        version,
    )


def _find(distribution: str, name: str) -> Path | None:
    """The file of an installed wheel that has this name, or is the shared library of this name."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if re.fullmatch(rf"{re.escape(name)}(\.(so|dylib|dll)[.\d]*)?", file.name):
            return Path(str(file.locate()))
    return None


def _search(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise LookupError(f"nothing matches {pattern!r}")
    return match.group(1)


def metis_partition(
    graph: UndirectedGraph,
    num_parts: int,
    *,
    node_weights: IntArray | None = None,
    tolerances: Sequence[float] | None = None,
    objective: Objective = "cut",
    method: Method = "kway",
    weigh_edges: bool = False,
    seed: int = 0,
    num_iterations: int = 10,
    num_trials: int | None = None,
) -> npt.NDArray[np.int64]:
    """Assign nodes to parts with one call of METIS.

    METIS treats ``tolerances`` as a goal: measure the result.

    Args:
        node_weights: Whole numbers from 0 up, ``[num_nodes, num_constraints]``; None balances the
            number of nodes.
        tolerances: Per constraint, largest weight of a part over the mean; None leaves METIS its
            own (about 1.03).
        objective: "cut" minimises cut edges, "vol" the number of (node, foreign part) pairs that
            are neighbours, which is what an exchange of halos sends.
        method: "kway" or "recursive" (bisection; "cut" only).
        weigh_edges: Count an edge as often as the graph had it.
        seed: Of METIS's own generator; the same seed gives the same parts.
        num_iterations: Refinement passes per level.
        num_trials: First partitions of the coarsest graph of which METIS keeps the best; by default
            as many as METIS likes.

    Returns:
        ``[num_nodes]``, the part of each node. Parts can come out empty.

    Raises:
        ValueError: An argument is out of its range.
        MetisError: The wheel is missing, a count does not fit its integers, or METIS failed.
    """
    weights = None if node_weights is None else np.asarray(node_weights)
    _check_arguments(graph, num_parts, weights, tolerances, objective, method, seed)
    if graph.num_nodes == 0 or num_parts == 1:
        return np.zeros(graph.num_nodes, dtype=np.int64)
    if graph.num_nodes <= num_parts:
        return np.arange(graph.num_nodes, dtype=np.int64)
    library = load_metis()
    edge_weights = graph.counts if weigh_edges else None
    if library is None:
        return _pymetis_partition(
            graph, num_parts, weights, edge_weights, tolerances, objective, method, seed
        )
    _check_width(library, graph, weights, edge_weights)
    index, real = library.index_type, library.real_type
    options = np.full(len(library.options) + 40, -1, dtype=index)
    library.handle.METIS_SetDefaultOptions(_pointer(options))
    options[library.options["OBJTYPE"]] = ("cut", "vol").index(objective)
    options[library.options["SEED"]] = seed
    options[library.options["NITER"]] = num_iterations
    if num_trials is not None:
        options[library.options["NIPARTS"]] = num_trials
    options[library.options["NUMBERING"]] = 0
    indptr = np.ascontiguousarray(graph.indptr, dtype=index)
    indices = np.ascontiguousarray(graph.indices, dtype=index)
    num_constraints = 1 if weights is None else weights.shape[1]
    bounds = None if tolerances is None else np.asarray(tolerances, dtype=real)
    parts = np.zeros(graph.num_nodes, dtype=index)
    call = getattr(library.handle, f"METIS_PartGraph{method.capitalize()}")
    node_array = None if weights is None else np.ascontiguousarray(weights, dtype=index)
    edge_array = None if edge_weights is None else np.ascontiguousarray(edge_weights, dtype=index)
    counts = np.array([graph.num_nodes, num_constraints, num_parts, 0], dtype=index)
    node_count, constraint_count, part_count, cut = np.split(counts, 4)
    arguments = (
        *(node_count, constraint_count, indptr, indices, node_array, None, edge_array),
        *(part_count, None, bounds, options, cut, parts),
    )
    with _metis_lock, _quiet(_may_print(graph, num_parts, weights)):
        status = call(*map(_pointer, arguments))
    if status != 1:
        raise MetisError(
            f"{_STATUS.get(status, 'METIS failed')} (status {status}) on {graph.num_nodes} nodes, "
            f"{graph.num_edges} edges, {num_parts} parts and {num_constraints} constraints; "
            "use fewer parts or constraints, or part_method='random'"
        )
    return parts.astype(np.int64)


def _pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p | None:
    # The pointer object keeps the array alive, so a temporary may be passed.
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)


def _check_arguments(
    graph: UndirectedGraph,
    num_parts: int,
    weights: IntArray | None,
    tolerances: Sequence[float] | None,
    objective: str,
    method: str,
    seed: int,
) -> None:
    if weights is not None:
        if weights.ndim != 2 or weights.shape[0] != graph.num_nodes or weights.shape[1] == 0:
            raise ValueError(
                "node_weights must be [num_nodes, num_constraints] with at least one constraint "
                f"(got shape {weights.shape} for {graph.num_nodes} nodes)"
            )
        if not np.issubdtype(weights.dtype, np.integer):
            raise ValueError(
                f"node_weights must be integers (got {weights.dtype}); scale and round"
            )
        if weights.size and weights.min() < 0:
            raise ValueError(f"node_weights must not be negative (got {weights.min()})")
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1 (got {num_parts})")
    if objective not in ("cut", "vol"):
        raise ValueError(f"objtype must be 'cut' or 'vol' (got {objective!r})")
    if method not in ("kway", "recursive"):
        raise ValueError(f"method must be 'kway' or 'recursive' (got {method!r})")
    if method == "recursive" and objective == "vol":
        raise ValueError("recursive bisection minimises the cut only; use method='kway' for 'vol'")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be in [0, 2**31) (got {seed})")
    if tolerances is None:
        return
    num_constraints = 1 if weights is None else weights.shape[1]
    if len(tolerances) != num_constraints or not (np.asarray(tolerances) > 1.0).all():
        raise ValueError(
            f"tolerances must hold {num_constraints} numbers above 1 (got {list(tolerances)})"
        )


def _check_width(
    library: MetisLibrary,
    graph: UndirectedGraph,
    weights: IntArray | None,
    edge_weights: IntArray | None,
) -> None:
    limit = np.iinfo(library.index_type).max
    totals = {
        "nodes": graph.num_nodes,
        "edges, both directions counted,": 2 * graph.num_edges,
        "parallel edges in all": 0 if edge_weights is None else int(edge_weights.sum()),
    }
    if weights is not None:
        for column in range(weights.shape[1]):
            totals[f"weight in constraint {column}"] = int(weights[:, column].sum(dtype=np.int64))
    for what, total in totals.items():
        if total >= limit:
            raise MetisError(
                f"METIS was built with {np.dtype(library.index_type).itemsize * 8}-bit integers: "
                f"the number of {what} must be below {limit} (got {total}); bring an assignment "
                "of your own as part_method, or use part_method='random'"
            )


def _may_print(graph: UndirectedGraph, num_parts: int, weights: IntArray | None) -> bool:
    """Whether some bisection might be left with a side without nodes, of which METIS complains."""
    if graph.num_nodes < 100 * num_parts:
        return True
    if weights is None:
        return False
    totals = weights.sum(axis=0, dtype=np.int64)
    return bool((weights.max(axis=0) * 10 * num_parts > totals).any())


@contextlib.contextmanager
def _quiet(active: bool) -> Iterator[None]:
    """Hold back what is written to file descriptor 1, and write it again without METIS's lines."""
    if not active:
        yield
        return
    with _stdout_lock, tempfile.TemporaryFile() as held:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        try:
            stdout = os.dup(1)
        except OSError:  # closed: nothing can be printed
            yield
            return
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        os.dup2(held.fileno(), 1)
        try:
            yield
        finally:
            libc.fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
            held.seek(0)
            others = b"".join(line for line in held if not line.startswith(b"\t***"))
            if others:
                os.write(1, others)


def _pymetis_partition(
    graph: UndirectedGraph,
    num_parts: int,
    weights: IntArray | None,
    edge_weights: IntArray | None,
    tolerances: Sequence[float] | None,
    objective: Objective,
    method: Method,
    seed: int,
) -> npt.NDArray[np.int64]:
    """The same with pymetis, which takes one constraint and minimises the cut."""
    try:
        import pymetis  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MetisError(
            f"part_method='metis' needs the package cmeel-metis; {INSTALL_METIS}, or use "
            "part_method='random'"
        ) from None
    num_constraints = 1 if weights is None else weights.shape[1]
    if num_constraints > 1 or objective != "cut":
        request = (
            f"objtype {objective}" if num_constraints == 1 else f"{num_constraints} constraints"
        )
        raise MetisError(
            f"pymetis balances one thing and minimises the cut (asked for {request}); for more, "
            f"the package cmeel-metis is needed: {INSTALL_METIS}"
        )
    options = pymetis.Options(seed=seed)
    if tolerances is not None:
        options.ufactor = max(1, round((tolerances[0] - 1) * 1000))
    _, parts = pymetis.part_graph(
        num_parts,
        xadj=graph.indptr.tolist(),
        adjncy=graph.indices.tolist(),
        vweights=None if weights is None else weights[:, 0].tolist(),
        eweights=None if edge_weights is None else edge_weights.tolist(),
        recursive=method == "recursive",
        options=options,
    )
    return np.asarray(parts, dtype=np.int64)
