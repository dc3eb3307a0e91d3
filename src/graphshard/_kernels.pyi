# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels: called by graphshard.ops alone, with arguments that it has checked.

Arrays are contiguous CPU tensors: values float32, float64 or bfloat16, ids int32 or int64, each of
one dtype throughout a call. Rows are flattened to [rows, width]. `eids` is None where an edge's
position is its id. A row loop is (lhs_offsets, rhs_offsets, inner, lhs_step, rhs_step), see
ops/_broadcast.py.

Every function checks the types, shapes and lengths of arrays, that what is written to is writable,
and that an indptr ascends from 0 to the number of edges: a ValueError or TypeError where not. Ids
are looked at where they are written by (keys, places, arg): an IndexError. Those of a structure
(indices, eids, src, dst) are not: Adjacency has looked at them. A tensor whose negation torch has
put off is read as what it stands for, and refused where it would be written to; so is one that
begins between two numbers.
"""

from typing import Any

from torch import Tensor

interface: int

def limit_registers(most: int) -> int: ...  # bytes of vector registers; returns those until now
def gains_from_products() -> bool: ...  # whether the next two are faster than torch's here
def multiply_rows(
    out: Tensor,  # [rows, width] float32; rows may lie apart
    rows: list[Tensor],  # each [rows, inner], likewise
    matrices: list[Tensor],  # each [inner, width], of any strides
    first: Tensor | None,  # [rows, width] or [1, width], added first; may be out itself
    relu: bool,
    num_threads: int,
) -> None: ...
def multiply_transposed(
    out: Tensor,  # [inner, width] float32
    rows: Tensor,  # [rows, inner]
    grads: Tensor,  # [rows, width]
    num_threads: int,
) -> None: ...
def spmm(
    out: Tensor,  # [num_dst, width]
    indptr: Tensor,  # [num_dst + 1]
    indices: Tensor,  # [num_edges]
    eids: Tensor | None,
    num_src: int,
    lhs: Tensor | None,  # [num_src, lhs_width]
    rhs: Tensor | None,  # [num_edges, rhs_width]
    arg: Tensor | None,  # [num_dst, width] of ids, for max and min
    op: str,
    reduce: str,
    lhs_offsets: Tensor,
    rhs_offsets: Tensor,
    inner: int,
    lhs_step: int,
    rhs_step: int,
    num_threads: int,
) -> None: ...
def argmax_backward(
    grad: Tensor,  # [num_dst, width]
    arg: Tensor,
    src: Tensor,  # [num_edges]
    num_src: int,
    lhs: Tensor | None,
    rhs: Tensor | None,
    lhs_places: Tensor,  # [width] int64
    rhs_places: Tensor,
    op: str,
    lhs_grad: Tensor | None,  # [num_src, width], zeros; float32 for bfloat16
    rhs_grad: Tensor | None,  # [num_edges, rhs_width], likewise
    num_threads: int,
) -> None: ...
def merge_best(
    best: Tensor,  # [size]
    edge: Tensor,
    value: Tensor,
    arg: Tensor,
    ids: Tensor | None,  # of the dtype of edge
    none: int,
    smallest: bool,
    num_threads: int,
) -> None: ...
def sddmm_csc(
    out: Tensor,  # [num_edges, width]
    indptr: Tensor,
    indices: Tensor,
    eids: Tensor | None,
    num_src: int,
    lhs: Tensor,
    rhs: Tensor,
    lhs_target: str,
    rhs_target: str,
    op: str,
    lhs_offsets: Tensor,
    rhs_offsets: Tensor,
    inner: int,
    lhs_step: int,
    rhs_step: int,
    num_threads: int,
) -> None: ...
def sddmm_coo(
    out: Tensor,
    src: Tensor,
    dst: Tensor,
    num_src: int,
    num_dst: int,
    lhs: Tensor,
    rhs: Tensor,
    lhs_target: str,
    rhs_target: str,
    op: str,
    lhs_offsets: Tensor,
    rhs_offsets: Tensor,
    inner: int,
    lhs_step: int,
    rhs_step: int,
    num_threads: int,
) -> None: ...
def edge_softmax(
    out: Tensor,  # [num_edges, width]
    indptr: Tensor,
    eids: Tensor | None,
    logits: Tensor,
    num_threads: int,
) -> None: ...
def edge_softmax_backward(
    result: Tensor,
    indptr: Tensor,
    eids: Tensor | None,
    out: Tensor,
    grad: Tensor,
    num_threads: int,
) -> None: ...
def group_by_key(
    keys: Tensor,  # [num_edges]
    others: Tensor,
    indptr: Tensor,  # [num_keys + 1], written
    grouped: Tensor,  # [num_edges], written: others in the order of keys
    positions: Tensor,  # [num_edges], written: where they stood
    num_threads: int,
) -> None: ...
def attention(
    score: str,
    num_src: int,
    num_dst: int,
    heads: int,
    dim: int,
    score_dim: int,
    slope: float,
    scale: float,
    values: Tensor,  # [num_src, heads * dim]
    src: Tensor | None,  # [num_src, heads * score_dim]; of joint scores the values
    dst: Tensor | None,  # [num_dst, heads * score_dim]
    edge: Tensor | None,  # [num_edges, heads * score_dim], of joint scores
    src_terms: Tensor | None,  # [num_src, heads], as wide as sums: float32 for bfloat16
    dst_terms: Tensor | None,  # [num_dst, heads], likewise
    edge_terms: Tensor | None,  # [num_edges, heads], likewise
    vector: Tensor | None,  # [heads * score_dim], likewise
    factor: Tensor | None,  # [num_edges, 1 or heads], likewise
    threshold: int,  # of the mask; 0 for none
    edge_seed: int,
    head_seed: int,
    kept: float,
    keys: Tensor | None,  # [num_edges] int32
) -> AttentionOperands: ...

class AttentionOperands:
    """Borrows the operands of one dtype. Every method is for edges with either type of id."""

    def forward(
        self,
        indptr: Tensor,  # of in-edges
        indices: Tensor,
        eids: Tensor | None,
        peak: Tensor,  # [num_dst, heads], as wide as sums
        total: Tensor,  # likewise
        sum: Tensor | None,  # [num_dst, heads * dim], likewise: continue this state
        out: Tensor | None,  # or write the result here
        begin: bool,  # whether the state begins here
        num_threads: int,
    ) -> None: ...
    def sources(
        self,
        indptr: Tensor,  # of out-edges
        indices: Tensor,
        eids: Tensor | None,
        peak: Tensor,
        total: Tensor,
        delta: Tensor,  # [num_dst, heads]
        grad: Tensor,  # [num_dst, heads * dim]
        values: Tensor | None,  # gradients, each written where wanted
        src: Tensor | None,
        src_terms: Tensor | None,
        dst_terms: Tensor | None,  # added to
        edge_terms: Tensor | None,
        factor: Tensor | None,
        num_threads: int,
    ) -> None: ...
    def destinations(
        self,
        indptr: Tensor,  # of in-edges
        indices: Tensor,
        eids: Tensor | None,
        peak: Tensor,
        total: Tensor,
        delta: Tensor,
        grad: Tensor,
        dst: Tensor | None,  # added to, as wide as sums
        vector: Tensor | None,  # [1, heads * score_dim], likewise
        edge: Tensor | None,  # written, as the rest
        edge_terms: Tensor | None,
        factor: Tensor | None,
        num_threads: int,
    ) -> None: ...

def attention_finish(
    out: Tensor,  # [num_dst, heads * dim], written; what it holds is finished where sums is None
    heads: int,
    sums: Tensor | None,  # [num_dst, heads * dim], as wide as sums
    total: Tensor | None,  # [num_dst, heads], likewise
    bias: Tensor | None,  # [heads * dim], likewise
    relu: bool,
    num_threads: int,
) -> None: ...
def attention_delta(
    delta: Tensor,  # [num_dst, heads], written
    grad: Tensor,  # [num_dst, heads * dim]
    out: Tensor,
    bias: Tensor | None,  # [heads * dim], as wide as sums
    passed: Tensor | None,  # [num_dst, heads * dim], written: grad behind a ReLU
    num_threads: int,
) -> None: ...
def head_products(
    rows: Tensor,  # [num_rows, heads * dim]
    vectors: Tensor,  # [2, heads * dim], as wide as sums
    first: Tensor,  # [num_rows, heads], written
    second: Tensor,
    num_threads: int,
) -> None: ...
def head_products_backward(
    rows: Tensor,
    vectors: Tensor,
    passed: Tensor | None,  # added to rows_grad
    first_grad: Tensor,
    second_grad: Tensor,
    rows_grad: Tensor,
    vectors_grad: Tensor,
    num_threads: int,
) -> None: ...
def add_rows(out: Tensor, places: Tensor, rows: Tensor, num_threads: int) -> None: ...
def copy_rows(
    out: Tensor,  # [m, row_bytes] uint8
    places: Tensor | None,  # [n]
    table: Tensor,  # [k, row_bytes] uint8, apart from out
    rows: Tensor | None,  # [n]
    num_threads: int,
) -> None: ...
def group_by_range(
    ids: Tensor,  # [n]
    starts: Tensor,  # [num_ranges + 1] int64
    last: int,
    order: Tensor,  # [n] int64, written
    rows: Tensor,  # [n], written
    sizes: Tensor,  # [num_ranges] int64, written
) -> bool: ...  # whether all ids are in a range
def group_equal(
    ids: Tensor,  # [n]
    distinct: Tensor,  # [n], written up to the number of groups
    starts: Tensor,  # [n + 1] int64, likewise, and one more
    order: Tensor,  # [n] int64, written
) -> int: ...  # the number of groups
def sum_groups(
    out: Tensor,  # [num_groups, dim] float32, written
    tables: list[Tensor],  # [_, dim] float32 each, their rows numbered through
    order: Tensor,  # [n] int64, numbers of rows
    starts: Tensor,  # [num_groups + 1] int64
    num_threads: int,
) -> None: ...
def update_rows(
    rule: int,  # 0 SGD, 1 Adagrad, 2 Adam
    numbers: list[float],  # rate, eps, 1 - betas[0], betas[1], 1 - betas[1]
    changed: list[Tensor],  # [k, dim] float32, as many as the rule has
    rows: Tensor,  # [num_groups], ascending, each once
    tables: list[Tensor],  # gradients, as for sum_groups
    order: Tensor,
    starts: Tensor,
    first_inner: int,  # numbers in this range are added up before they are added to others
    last_inner: int,
    num_threads: int,
) -> None: ...
def ungroup(
    order: Tensor,  # [n] int64
    counts: Tensor,  # [n] int64
    values: Tensor,  # [sum of counts]
    new_counts: Tensor,  # [n] int64, written
    new_values: Tensor,  # [sum of counts], written
) -> bool: ...  # whether order is a permutation, and counts add up
def empty(shape: list[int], code: int, bits: int) -> object: ...  # a DLPack capsule
def release_blocks() -> None: ...
def block_counts() -> tuple[int, int, int]: ...  # bytes in use, waiting, and the peak of use

# Blocks that ranks on one machine share, see csrc/runtime/shared_blocks.h. A block is bytes in
# memory, writable, that begin with a header: a map, or a tensor.
shared_header: int  # bytes before the contents
shared_readers: int  # most ranks that can read a block

def begin_use(block: object, token: int, use: int) -> None: ...
def is_read(block: object, use: int, readers: list[int]) -> bool: ...
def mark_left(block: object) -> None: ...
def read_shared(
    process: int,
    descriptor: int,
    token: int,
    use: int,
    reader: int,
    offset: int,
    into: Tensor,  # uint8, as many bytes as are read
) -> int: ...  # 0, or an error number
def has_left(process: int, descriptor: int, token: int) -> bool: ...
def read_rows(
    descriptor: int,  # of a file
    offset: int,  # bytes before the first row
    num_rows: int,  # in the file
    rows: Tensor,  # [n] int32 or int64
    places: Tensor | None,  # [n], distinct; None for the first n rows in order
    out: Tensor,  # [m, row_bytes] uint8, written
) -> int: ...  # 0, or an error number

# Words that are not zero, of [n] uint8, int16 or int32, see csrc/runtime/nonzero_words.h.
def pack_words(
    words: Tensor,
    packed: Tensor,  # [n // 8 * 7 + 64 or more], written
    bits: Tensor,  # [(n + 63) // 64] int64, written
) -> int: ...  # how many; -1 where there are too few zeros
def unpack_words(words: Tensor, count: int, bits: Tensor) -> bool: ...  # in place

class Drawing:
    """One draw: `count`, then `write` into arrays of that many. Weights and ids are by position."""

    def __init__(
        self,
        indptr: Tensor,  # [num_rows + 1]
        rows: Tensor,  # [n], int32 or int64
        row_ids: Tensor,  # [n], int32 or int64
        fanout: int,  # -1 for all
        key: int,  # in [0, 2^64)
        replace: bool,
        prob: Tensor | None,  # [num_edges], or more with prob_ids; float32, float64 or uint8
        prob_ids: Tensor | None,  # [num_edges], which entry of prob an edge has
        labor_ids: Tensor | None,  # [num_edges] int32 or int64
        mask: Tensor | None,  # [num_edges] uint8, what is excluded
        excluded: Tensor | None,  # int64 positions, strictly ascending
        num_edges: int,
        counts: Tensor,  # [n] int64, written by count
    ) -> None: ...
    def count(self, num_threads: int) -> int:
        """The number of edges drawn, or -1 - i where rows[i] or its degree is out of range."""

    def write(
        self,
        indices: Tensor,  # [num_edges]
        eids: Tensor | None,  # [num_edges], of the dtype of indptr
        edges: Tensor,  # [total], likewise; written: eids, or positions without them
        picked: Tensor,  # [total], written: indices
        num_threads: int,
    ) -> None: ...
    def write_pieces(
        self,
        starts: Tensor,  # [num_pieces + 1] int64, the first position of each, and num_edges
        sources: list[Tensor],  # of each piece, int32 or int64
        owns: list[int],  # numbers below that are an id less shift
        shifts: list[int],
        others: list[Tensor],  # ids of further numbers
        edges: Tensor,  # [total], written: positions
        picked: Tensor,  # [total], written: ids
        num_threads: int,
    ) -> None: ...

class IdTable:
    def __init__(self, num_ids: int) -> None: ...
    def renumber(
        self,
        first: Tensor,  # [n]
        others: Tensor,  # [m]
        ids: Tensor,  # [n + m], its beginning is written: the id behind each number
        local: Tensor,  # [m], written
    ) -> int:
        """How many numbers there are, or -1 where an id is out of range or first repeats one."""

class IntegerTable:
    """Integers and their numbers, by first appearance."""

    def __init__(self) -> None: ...
    def size(self) -> int: ...
    def reserve(self, num_keys: int) -> None:
        """Make room for this many keys, at most 16 times those that there are."""

    def look_up(
        self,
        keys: Any,  # [n] int64
        rows: Any,  # [n] written: the number of each key, -1 for none; int32, too, if not inserts
        inserts: bool,  # new keys get numbers
    ) -> None: ...
    def copy_keys(self, keys: Any) -> None:
        """Write the keys, [size()] int64, by number."""

class BytesTable:
    """Strings of bytes and their numbers, by first appearance."""

    def __init__(self) -> None: ...
    def size(self) -> int: ...
    def num_bytes(self) -> int: ...
    def reserve(self, num_keys: int) -> None:
        """Make room for this many keys, at most 16 times those that there are."""

    def look_up(
        self,
        offsets: Any,  # [n + 1] int32 or int64, ascending: ends of texts
        data: Any,  # uint8
        rows: Any,  # [n] written; int64, or int32 if not inserts
        inserts: bool,
    ) -> None: ...
    def copy_keys(
        self,
        offsets: Any,  # [size() + 1] int64, written
        data: Any,  # [num_bytes()] uint8, written
    ) -> None: ...

def parse_integers(
    offsets: Any,  # [n + 1] int32 or int64
    data: Any,  # uint8
    out: Any,  # [n] int64, written
) -> tuple[bool, bool, bool]:
    """Whether all are integers as a program writes them; some negative; some above 2^63 - 1."""

def has_outer_blank(
    offsets: Any,  # [n + 1] int32 or int64
    data: Any,  # uint8
) -> bool:
    """Whether some text begins or ends with a blank."""

def count_repeated(
    src: Any,  # [num_edges] int32 or int64
    dst: Any,  # [num_edges] of the same dtype
    num_src: int,  # above every src
    num_dst: int,  # above every dst
    num_threads: int,
) -> int:
    """How many edges have both ends of an earlier one."""

# -- partitions made while edges pass by; numbers of nodes are uint32 or int64 ---------------------

def bucket_edges(
    rows: Any,  # [num_edges] ids, int32, int64 or uint32: of the ends that are sorted by
    cols: Any,  # [num_edges] likewise, of the others
    numbers: Any,  # [num_nodes], new numbers of nodes, of the width of columns; None to keep them
    num_nodes: int,
    first_row: int,  # the node that id 0 of rows stands for; ids of rows are below num_rows
    num_rows: int,
    first_col: int,
    num_cols: int,
    values: Any,  # [num_edges] uint32; None to number edges from first_value on
    first_value: int,
    value_bytes: int,  # 0, 4 or 8, in a record
    col_bytes: int,  # 4 or 8, in a record
    drops_loops: bool,
    shift: int,  # a bucket is of 2^shift rows
    records: Any,  # uint8, written: room for all edges, by bucket
    counts: Any,  # [num_buckets] int64, written: records of each bucket
    num_threads: int,
) -> None: ...
def count_rows(
    records: Any,  # uint8
    record_bytes: int,
    degrees: Any,  # [num_rows] uint32, added to
) -> None: ...
def place_rows(
    records: Any,  # uint8
    places: Any,  # [num_rows] int64: of the next record of each row; go up
    begin: int,  # of the window of places that is written
    cols: Any,  # [places in the window], written
    values: Any,  # likewise, uint32 or int64; or None
) -> None: ...
def merge_repeated(
    degrees: Any,  # [num_rows] uint32, written
    cols: Any,  # [num_edges], written
    weights: Any,  # [num_edges] uint32, written
) -> int:
    """Sort rows, and join edges with the same two ends; how many edges are left."""

def hash_edges(
    rows: Any,  # [num_edges] int32 or int64
    cols: Any,  # [num_edges]
    first_row: int,
    first_col: int,
    first: int,  # number of the first edge
    num_threads: int,
) -> tuple[int, int]:
    """A sum over edges in their order, and one that is 0 for symmetric edges; modulo 2^64."""

def propagate_labels(
    degrees: Any,  # [num_rows] uint32
    cols: Any,  # [num_edges]
    weights: Any,  # [num_edges] uint32, or None
    batch_ends: Any,  # int64, ascending to num_rows
    first_row: int,
    node_weights: Any,  # [num_nodes, num_constraints] uint32; None: one constraint, of ones
    labels: Any,  # [num_nodes], written
    sizes: Any,  # [num_nodes, num_constraints] uint32, written: weights of clusters
    limits: Any,  # [num_constraints] uint32
    favourites: Any,  # [num_nodes], written; or None
    num_threads: int,
) -> int:
    """How many nodes got another label."""

def contract(
    degrees: Any,  # [num_rows] uint32
    cols: Any,  # [num_edges]
    weights: Any,  # [num_edges] uint32, or None
    first_row: int,
    clusters: Any,  # [num_nodes]
    rows: Any,  # [num_edges or more], written
    new_cols: Any,  # likewise
    new_weights: Any,  # likewise, uint32
    num_threads: int,
) -> int:
    """How many edges between clusters were written."""

def refine_parts(
    degrees: Any,  # [num_rows] uint32
    cols: Any,  # [num_edges]
    weights: Any,  # [num_edges] uint32, or None
    batch_ends: Any,  # int64, ascending to num_rows
    first_row: int,
    node_weights: Any,  # [num_nodes, num_constraints] uint32; None: one constraint, of ones
    parts: Any,  # [num_nodes] uint16, written
    loads: Any,  # [num_parts, num_constraints] int64, written
    limits: Any,  # [num_constraints] int64
    allowed_loss: int,
    num_threads: int,
) -> int:
    """How many nodes moved."""

def search_moves(
    indptr: Any,  # [num_nodes + 1] int64
    cols: Any,  # [num_edges] uint32, each edge from both ends, or from that of a free node
    weights: Any,  # [num_edges] uint32, or None
    node_weights: Any,  # [num_nodes, num_constraints] uint32; None: one constraint, of ones
    parts: Any,  # [num_nodes] uint16, written
    loads: Any,  # [num_parts, num_constraints] int64, written
    limits: Any,  # [num_constraints] int64
    num_free: int,  # nodes from here on stay
    patience: int,  # moves without a better moment that end a search
    rounds: int,  # at most
    share: int,  # no round follows one that gained no more than the first one's / share
    num_threads: int,
) -> int:
    """By how much the cut got smaller."""

def count_halos(
    degrees: Any,  # [num_rows] uint32
    cols: Any,  # [num_edges]
    in_degrees: Any,  # [num_rows] uint32: so many first columns are sources; None: each is both
    first_row: int,
    parts: Any,  # [num_nodes] uint16
    near: Any,  # [num_nodes] uint8, rows are written: 0 for all neighbours in the node's part
    table: Any,  # [num_nodes, (num_parts + 3) // 4] uint8, rows near others: edges into parts
    halos: Any,  # [num_parts] int64, added to
    num_threads: int,
) -> int:
    """How many edges lead out of these nodes to other parts; counts only nodes that are near."""

def limit_halos(
    degrees: Any,  # [num_rows] uint32
    cols: Any,  # [num_edges]
    in_degrees: Any,  # as of count_halos
    batch_ends: Any,  # int64, ascending to num_rows
    first_row: int,
    node_weights: Any,  # [num_nodes, num_constraints] uint32; None: one constraint, of ones
    parts: Any,  # [num_nodes] uint16, written
    loads: Any,  # [num_parts, num_constraints] int64, written
    limits: Any,  # [num_constraints] int64
    near: Any,  # as count_halos writes it; written
    table: Any,  # as count_halos writes it; written
    halos: Any,  # [num_parts] int64, written
    largest: int,  # the most that a halo may grow to
    price: int,  # of a node in such a halo, in 256ths of an edge that is cut
    budget: Any,  # [1] int64, written: by how many edges the cut may still grow
    num_threads: int,
) -> int:
    """How many nodes moved."""

def count_ids(
    ids: Any,  # int32 or int64
    first: int,  # the node that id 0 stands for; ids are below num_ids
    num_ids: int,
    degrees: Any,  # [num_nodes] uint32, added to
    num_threads: int,
) -> None: ...
def order_by_key(
    keys: Any,  # [num_nodes] uint8, uint16, uint32 or int64
    num_keys: int,  # keys are below it
    order: Any,  # [num_nodes]; or None
    ordered: Any,  # [num_nodes], written
    num_threads: int,
) -> None: ...
def count_cut(
    src: Any,  # [num_edges] int32 or int64
    dst: Any,  # [num_edges]
    parts: Any,  # [num_nodes] uint16
    first_src: int,
    num_src: int,
    first_dst: int,
    num_dst: int,
    pairs: Any,  # [num_parts, num_parts] int64, added to: by owner of the source and reader
    num_threads: int,
) -> None: ...
def mark_readers(
    src: Any,  # [num_edges] int32 or int64
    dst: Any,  # [num_edges]
    parts: Any,  # [num_nodes] uint16
    first_src: int,
    num_src: int,
    first_dst: int,
    num_dst: int,
    digits: Any,  # [num_parts, num_parts] uint8
    masks: Any,  # [num_nodes] uint8, bits are set
    num_threads: int,
) -> None: ...
def mark_outside(
    ids: Any,
    first: int,
    last: int,
    bits: Any,  # uint64, a bit for each id; those of ids outside [first, last) are set
) -> int:
    """How many ids were outside, repeated ones counted each time."""

def rank_words(
    bits: Any,  # [num_words] uint64
    ranks: Any,  # [num_words] int64, written: bits before each word
) -> int:
    """How many bits are set."""

def list_marked(
    bits: Any,  # uint64
    first_word: int,
    last_word: int,
    ids: Any,  # int64, written: room for 64 of each word
) -> int:
    """How many ids were written."""

def find_local_ids(
    ids: Any,
    first: int,
    last: int,
    bits: Any,  # [num_words] uint64
    ranks: Any,  # [num_words] int64
    local_ids: Any,  # int32 or int64, written
) -> None: ...
def find_cut_edges(
    degrees: Any,  # [num_rows] uint32
    cols: Any,  # [num_edges]
    first_row: int,
    first_edge: int,
    ends: Any,  # [num_parts] int64: where the nodes of each part end
    part: int,  # which owns the rows
    records: Any,  # uint8, written: column, row and number of each edge, by owner of the column
    counts: Any,  # [num_parts] int64, written
) -> None: ...
