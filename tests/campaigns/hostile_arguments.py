# SPDX-License-Identifier: Apache-2.0
"""Hostile arguments for every public operator and every function of the binding layer.

    python tests/campaigns/hostile_arguments.py --calls 20000

Each call begins as it should be, then one to three of its arguments become hostile: another
length, another kind of tensor, ids of nothing, numbers out of proportion. All of it follows from
the seed and the number of the call. What may come of it: the result that plain torch gives, or an
error that is worded for the caller. Calls run in forked processes, so that one that ends its
process is named, and the others go on. ``--extension FILE`` takes the kernels from elsewhere, such
as a build with sanitizers.

Ids of a structure (indices, eids, src, dst) keep their values in calls of the binding layer:
`Adjacency` has looked at them, and among public operators its own arguments are hostile, too.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import linecache
import os
import random
import resource
import signal
import struct
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


def use_extension(path: str) -> None:
    """Take the compiled kernels from a file, before anybody looks for them."""
    spec = importlib.util.spec_from_file_location("graphshard._kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["graphshard._kernels"] = module
    spec.loader.exec_module(module)


# For pytest's -p, too: tests then run with these kernels.
if os.environ.get("GRAPHSHARD_CAMPAIGN_EXTENSION"):
    use_extension(os.environ["GRAPHSHARD_CAMPAIGN_EXTENSION"])

import hostile_values  # noqa: E402
import torch  # noqa: E402
from hostile_operators import RECIPES  # noqa: E402
from torch import Tensor  # noqa: E402

import graphshard  # noqa: E402
from graphshard._base import kernels as _kernel  # noqa: E402

SOURCE = str(Path(graphshard.__file__).resolve().parent)
STUB = Path(SOURCE) / "_kernels.pyi"
ERRORS = (
    TypeError, ValueError, IndexError, MemoryError, NotImplementedError, OverflowError, RuntimeError
)  # fmt: skip
#: Arguments whose values the binding layer takes on trust.
TRUSTED = {"indices", "eids", "src", "dst", "num_src", "num_dst"}
CHUNK = 500
CHUNK_SECONDS = 300
MEMORY = 6 << 30

PUBLIC = {**hostile_values.SHAPES, **hostile_values.KINDS, **hostile_values.CONTENTS}
#: A gradient goes through torch's hands first.
GRADIENT = {
    name: change for name, change in PUBLIC.items()
    if name not in ("sparse", "meta", "quantized", "dtype")
}  # fmt: skip
RAW = {**PUBLIC, **hostile_values.ARRAYS}
RAW_TRUSTED = {
    name: change for name, change in RAW.items()
    if name not in hostile_values.CONTENTS and name not in ("negated", "conjugate", "other")
}  # fmt: skip


@dataclass
class Outcomes:
    """What came of calls: how often, and what should not have come."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def add(self, target: str, kind: str) -> None:
        self.counts.setdefault(target, Counter())[kind] += 1

    def update(self, other: dict[str, Any]) -> None:
        for target, counts in other["counts"].items():
            self.counts.setdefault(target, Counter()).update(counts)
        self.findings += other["findings"]


# -- public operators ---------------------------------------------------------------------------


def public_call(name: str, seed: int) -> tuple[Callable[[], Any], list[str], dict[str, Any]]:
    """A hostile call, what was done to its arguments, and these."""
    rng = random.Random(seed)
    function, given = RECIPES[name](rng)
    given, done = made_hostile(given, rng, lambda n: GRADIENT if n == "grad" else PUBLIC)
    return (lambda: function(**given)), done, given


def made_hostile(
    given: dict[str, Any], rng: random.Random, changes: Callable[[str], Any]
) -> tuple[dict[str, Any], list[str]]:
    """``given`` with some values changed; `changes` tells what may be done to which."""
    given, done = dict(given), []
    for _ in range(0 if not given else rng.choice((0, 1, 1, 1, 2, 3))):
        place = rng.choice(list(given))
        allowed = changes(place)
        if allowed is None:
            continue
        peers = [v for n, v in given.items() if n != place and isinstance(v, Tensor)]
        if place in TRUSTED and allowed is RAW_TRUSTED:
            peers = []
            if not isinstance(given[place], Tensor):
                continue
        try:
            what, given[place] = hostile_values.change(given[place], rng, peers, allowed)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
            continue  # this tensor has no such version
        done.append(f"{place}: {what}")
    return given, done


def attempt(call: Callable[[], Any]) -> tuple[str, Any]:
    """("result", what) or ("error", the exception)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "result", call()
        except Exception as error:
            return "error", error


def fault_of(error: BaseException) -> str | None:
    """Why an error is not one for a caller; None where it is."""
    if not isinstance(error, ERRORS):
        return "an error of the inside"
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    if "incompatible function arguments" in str(error) or "incompatible constructor" in str(error):
        return "the binding layer's own words"
    if last is None or not last.filename.startswith(SOURCE):
        return None
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    is_worded = line.startswith("raise") or isinstance(error, (MemoryError, IndexError))
    if isinstance(error, RuntimeError) and not is_worded and "memory" not in str(error):
        return "torch's own words"
    return None


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    is_number = isinstance(value, int) and -(2**63) <= value < 2**63
    return [torch.tensor(value)] if is_number else []


def differs(first: Any, second: Any) -> str | None:
    """How what the kernels gave differs from what plain torch gave."""
    ours, theirs = tensors_in(first), tensors_in(second)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors instead of {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
        if one.is_meta or one.layout != torch.strided or one.is_quantized:
            continue
        one, other = (t.detach().resolve_neg().resolve_conj() for t in (one, other))
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return f"{one.tolist()} instead of {other.tolist()}"
            continue
        rough = 0.1 if one.dtype in (torch.bfloat16, torch.float16) else 1e-3
        is_plain = one.double().isfinite() & other.double().isfinite()
        near = torch.isclose(one.double(), other.double(), rough, rough) | ~is_plain
        if not bool(near.all()):
            return f"{one.flatten().tolist()[:24]} instead of {other.flatten().tolist()[:24]}"
    return None


def try_public(name: str, seed: int, outcomes: Outcomes) -> None:
    torch.manual_seed(seed)
    call, done, given = public_call(name, seed)
    kind, found = attempt(call)
    plain_call, _, plain_given = public_call(name, seed)
    with _kernel.force_extension(False):
        plain_kind, plain = attempt(plain_call)
    outcomes.add(name, type(found).__name__ if kind == "error" else "result")
    where = f"{name} {seed} ({'; '.join(done) or 'as it should be'})"
    if kind == "error":
        fault = fault_of(found)
        if fault is None and not done:
            fault = "refused what is right"
        if fault is not None:
            outcomes.findings.append(f"{where}: {fault}: {type(found).__name__}: {found}")
    elif plain_kind == "error":
        outcomes.findings.append(f"{where}: taken, but not by plain torch: {plain}")
    else:
        difference = differs((found, given), (plain, plain_given))
        if difference is not None:
            outcomes.findings.append(f"{where}: {difference}")


# -- the binding layer --------------------------------------------------------------------------


def stub_arguments() -> dict[str, list[str]]:
    """The names of arguments of each function and method that the stub declares."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [argument.arg for argument in node.args.args]
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    names = [argument.arg for argument in method.args.args[1:]]
                    found[f"{node.name}.{method.name}"] = names
    return found


@dataclass
class Recorded:
    """One call of the extension; of a method, with those that its object had before."""

    name: str
    arguments: tuple[Any, ...]
    before: list[Recorded] = field(default_factory=list)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_contiguous() else value.detach()
    return value


class _Object:
    """Stands before an object of the extension, and notes what is called."""

    def __init__(self, kind: str, real: Any, made: Recorded, calls: list[Recorded]) -> None:
        self._kind, self._real, self._calls = kind, real, calls
        self._before = [made]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def call(*arguments: Any) -> Any:
            copies = tuple(map(_copied, arguments))
            recorded = Recorded(f"{self._kind}.{name}", copies, list(self._before))
            self._before.append(recorded)
            self._calls.append(recorded)
            return method(*arguments)

        return call


class Recorder:
    """Stands before the extension, and notes what is called."""

    kinds: ClassVar = {"attention": "AttentionOperands", "Drawing": "Drawing", "IdTable": "IdTable"}

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[Recorded] = []

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._module, name)
        if not callable(member):
            return member

        def call(*arguments: Any) -> Any:
            recorded = Recorded(name, tuple(map(_copied, arguments)))
            self.calls.append(recorded)
            made = member(*arguments)
            kind = self.kinds.get(name)
            return made if kind is None else _Object(kind, made, recorded, self.calls)

        return call


def other_calls(rng: random.Random) -> list[Recorded]:
    """Calls that no operator makes: of shared memory, tables, products, vector registers.

    The calls that follow take the code for the registers that one of the last kind allows.
    """
    block, into = (torch.zeros(size, dtype=torch.uint8) for size in (4096, 64))
    place = (rng.choice((os.getpid(), -1, 2**31 - 1)), rng.choice((-1, 0, 9999)), 7)
    rows = torch.tensor([2, 0, 1])
    return [
        Recorded("begin_use", (block, 7, 1)),
        Recorded("is_read", (block, 1, [0, 3])),
        Recorded("mark_left", (block,)),
        Recorded("read_shared", (*place, 1, 0, 0, into)),
        Recorded("has_left", place),
        Recorded("read_rows", (place[1], 0, 3, rows, None, into.view(8, 8))),
        Recorded("read_rows", (place[1], 5, 9, rows.int(), rows, into.view(8, 8))),
        *_word_calls(rng),
        Recorded("empty", ([2**11, 2**11], 2, 32)),
        Recorded("release_blocks", ()),
        Recorded("block_counts", ()),
        *_table_calls(),
        *_partition_calls(),
        *_dense_calls(rng),
        _sources_in_pieces(),
        Recorded("limit_registers", (rng.choice((16, 32, 64)),)),
    ]


def _word_calls(rng: random.Random) -> list[Recorded]:
    """Messages without their zeros."""
    dtype, num_words = rng.choice((torch.uint8, torch.int16, torch.int32)), rng.choice((64, 100))
    words, room = torch.zeros(num_words, dtype=dtype), torch.zeros(200, dtype=dtype)
    bits = torch.tensor([rng.choice((0, 7, -1)), 0][: (num_words + 63) // 64])
    return [
        Recorded("pack_words", (words, room, torch.zeros_like(bits))),
        Recorded("unpack_words", (words, 3, bits)),
    ]


def _dense_calls(rng: random.Random) -> list[Recorded]:
    """Products, which operators leave to torch on some machines."""
    num_rows, inner, width = rng.choice((1, 13, 300)), rng.choice((1, 20)), rng.choice((3, 33))
    rows, grads = torch.randn(num_rows, inner), torch.randn(num_rows, width)
    matrix, out = torch.randn(width, inner).t(), torch.zeros(num_rows, width)
    first = rng.choice((None, torch.randn(1, width), grads))
    return [
        Recorded("gains_from_products", ()),
        Recorded("multiply_rows", (out, [rows, rows], [matrix, matrix], first, True, 2)),
        Recorded("multiply_transposed", (torch.zeros(inner, width), rows, grads, 2)),
    ]


def _sources_in_pieces() -> Recorded:
    """A draw of all edges of two rows, whose sources are in two pieces."""
    rows, counts = torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64)
    how = (2, 7, False, None, None, None, None, None, 4, counts)
    made = Recorded("Drawing", (torch.tensor([0, 2, 4]), rows, rows.clone(), *how))
    sources = [torch.tensor([0, 3, 1], dtype=torch.int32), torch.tensor([2])]
    others = [torch.tensor([9, 8]), torch.tensor([7], dtype=torch.int32)]
    pieces = (torch.tensor([0, 3, 4]), sources, [2, 3], [5, 0], others)
    out = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    before = [made, Recorded("Drawing.count", (1,), [made])]
    return Recorded("Drawing.write_pieces", (*pieces, *out, 1), before)


def _table_calls() -> list[Recorded]:
    keys, ends = torch.tensor([5, -3, 5, 2**62]), torch.tensor([0, 1, 1, 3])
    text, rows = torch.tensor([49, 50, 51], dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    integers, strings = Recorded("IntegerTable", ()), Recorded("BytesTable", ())
    of_integers = [integers, Recorded("IntegerTable.look_up", (keys, rows, True), [integers])]
    of_strings = [strings, Recorded("BytesTable.look_up", (ends, text, rows[:3], True), [strings])]
    return [
        *of_integers,
        *of_strings,
        Recorded("IntegerTable.size", (), of_integers),
        Recorded("IntegerTable.reserve", (9,), of_integers),
        Recorded("BytesTable.reserve", (9,), of_strings),
        Recorded("IntegerTable.copy_keys", (rows[:3].clone(),), of_integers),
        Recorded("BytesTable.size", (), of_strings),
        Recorded("BytesTable.num_bytes", (), of_strings),
        Recorded("BytesTable.copy_keys", (torch.zeros_like(ends), text.clone()), of_strings),
        Recorded("parse_integers", (ends, text, rows[:3].clone())),
        Recorded("has_outer_blank", (ends.int(), text)),
        Recorded("count_repeated", (torch.tensor([0, 1, 0]), torch.tensor([2, 2, 2]), 3, 3, 1)),
    ]


def _partition_calls() -> list[Recorded]:
    """Of a cycle of four nodes, each edge from both ends, in parts {0, 1} and {2, 3}."""

    def array(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values).to(dtype)

    u32, i64, u8 = torch.uint32, torch.int64, torch.uint8
    src, dst = array([1, 3, 0, 2, 1, 3, 0, 2], i64), array([0, 0, 1, 1, 2, 2, 3, 3], i64)
    degrees, cols = array([2, 2, 2, 2], u32), src.to(u32)
    ones, ends, parts = array([1] * 8, u32), array([2, 4], i64), array([0, 0, 1, 1], torch.uint16)
    records = torch.zeros(8 * 16, dtype=u8)
    block = (degrees, cols, None, ends, 0, None)
    pairs = array([[0, 0], [0, 0]], i64)
    ranges = (0, 4, 0, 4)
    numbers = array([3, 2, 1, 0], u32)
    bits, ranks = array([9], torch.uint64), array([0], i64)
    made = [torch.zeros(8, dtype=u32) for _ in range(3)]
    bucket = (dst, src, numbers, 4, 0, 4, 0, 4, None, 0, 8, 4, False, 1, records, ends.clone(), 1)
    return [
        Recorded("bucket_edges", bucket),
        Recorded("count_rows", (records, 16, degrees.clone())),
        Recorded("place_rows", (records, array([0, 8], i64), 0, made[0], src.clone())),
        Recorded("merge_repeated", (degrees.clone(), cols.clone(), ones.clone())),
        Recorded("hash_edges", (dst, src, 0, 0, 0, 1)),
        Recorded(
            "propagate_labels",
            (*block, numbers.clone(), array([[1]] * 4, u32), array([2], u32), made[0][:4], 1),
        ),
        Recorded("contract", (degrees, cols, ones, 0, numbers, *made, 1)),
        Recorded(
            "refine_parts", (*block, parts.clone(), array([[2], [2]], i64), array([3], i64), 1, 1)
        ),
        Recorded(
            "search_moves",
            (
                *(array([0, 2, 4, 6, 8], i64), cols, ones, None, parts.clone()),
                *(array([[2], [2]], i64), array([3], i64), 4, 9, 2, 9, 1),
            ),
        ),
        Recorded(
            "count_halos",
            (
                *(degrees, cols, degrees.clone(), 0, parts, array([1] * 4, u8)),
                *(records[:4].view(4, 1), ends * 0, 1),
            ),
        ),
        Recorded(
            "limit_halos",
            (
                *(*block, parts.clone(), array([[2], [2]], i64), array([3], i64)),
                *(array([1] * 4, u8), array([[6], [5], [5], [6]], u8), array([2, 2], i64), 2, 99),
                *(array([9], i64), 1),
            ),
        ),
        Recorded("count_ids", (dst, 0, 4, degrees.clone(), 1)),
        Recorded("order_by_key", (parts, 2, numbers, made[0][:4], 1)),
        Recorded("count_cut", (src, dst, parts, *ranges, pairs, 1)),
        Recorded("mark_readers", (src, dst, parts, *ranges, pairs.to(u8), records[:4], 1)),
        Recorded("mark_outside", (cols, 0, 2, bits.clone())),
        Recorded("rank_words", (bits, ranks.clone())),
        Recorded("list_marked", (bits, 0, 1, torch.zeros(64, dtype=i64))),
        Recorded("find_local_ids", (numbers, 1, 3, bits, ranks, torch.zeros(4, dtype=i64))),
        Recorded("find_cut_edges", (degrees[:2], cols[:4], 0, 0, ends, 0, records, ends.clone())),
    ]


def recorded_calls(rng: random.Random) -> list[Recorded]:
    """What some operator, called as it should be, asks of the extension."""
    if rng.random() < 0.1:
        return [rng.choice(other_calls(rng))]
    return calls_of(rng.choice(list(RECIPES)), rng)


def calls_of(name: str, rng: random.Random) -> list[Recorded]:
    """What an operator, called as it should be, asks of the extension."""
    real = sys.modules["graphshard._kernels"]
    recorder = Recorder(real)
    function, given = RECIPES[name](rng)
    load, _kernel._load = _kernel._load, lambda: recorder  # type: ignore[assignment]
    try:
        attempt(lambda: function(**given))
    finally:
        _kernel._load = load
    return recorder.calls


def _changes_of(name: str) -> dict[str, Any] | None:
    if name in ("process", "descriptor"):
        return None
    return RAW_TRUSTED if name in TRUSTED else RAW


def try_raw(seed: int, outcomes: Outcomes, names: dict[str, list[str]]) -> None:
    rng = random.Random(seed)
    calls = recorded_calls(rng)
    if not calls:
        return
    recorded = rng.choice(calls)
    name = recorded.name
    arguments = names[name] if name in names else names[f"{name}.__init__"]
    given, done = made_hostile(
        dict(zip(arguments, recorded.arguments, strict=True)), rng, _changes_of
    )
    if "num_threads" in given and rng.random() < 0.2:
        given["num_threads"] = rng.choice((-1, 0, 2, 3, 2**31 - 1))
    module: Any = sys.modules["graphshard._kernels"]

    def run() -> Any:
        owner = module
        for earlier in recorded.before:
            *_, method = earlier.name.split(".")
            made = getattr(owner, method)(*earlier.arguments)
            owner = made if owner is module else owner
        return getattr(owner, recorded.name.split(".")[-1])(*given.values())

    kind, found = attempt(run)
    target = f"_kernels.{recorded.name}"
    outcomes.add(target, type(found).__name__ if kind == "error" else "result")
    if kind == "error" and not done:
        outcomes.findings.append(f"{target} {seed} (as it should be): {found}")


# -- in processes of their own ------------------------------------------------------------------


def run_chunk(first: int, last: int, seed: int, write: int, progress: int) -> None:
    outcomes, names = Outcomes(), stub_arguments()
    targets = list(RECIPES)
    for number in range(first, last):
        os.pwrite(progress, struct.pack("q", number), 0)
        if number % 3 == 2:
            try_raw(seed + number, outcomes, names)
        else:
            try_public(targets[number % len(targets)], seed + number, outcomes)
    text = json.dumps({"counts": outcomes.counts, "findings": outcomes.findings})
    with os.fdopen(write, "w") as stream:
        stream.write(text)


def run(calls: int, seed: int, limit_memory: bool) -> Outcomes:
    """Make calls in forked processes, and go on behind one that ends its process."""
    outcomes = Outcomes()
    progress = os.memfd_create("progress")
    first = 0
    while first < calls:
        last = min(first + CHUNK, calls)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            signal.alarm(CHUNK_SECONDS)
            if limit_memory:
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            try:
                run_chunk(first, last, seed, write, progress)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as stream:
            text = stream.read()
        _, status = os.waitpid(child, 0)
        if status == 0:
            outcomes.update(json.loads(text))
            first = last
            continue
        (number,) = struct.unpack("q", os.pread(progress, 8, 0))
        outcomes.findings.append(f"call {number} ended its process: {_ending(status)}")
        outcomes.add("a process", "ended")
        first = number + 1
    os.close(progress)
    return outcomes


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make calls, write what came of them, and return whether there are findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one call, in this process")
    parser.add_argument("--outcomes", type=Path, help="where to write them, as JSON")
    parser.add_argument("--sanitized", action="store_true", help="do not limit addresses")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    assert _kernel.extension_available(), "there are no kernels to try"
    if args.only is not None:
        outcomes, targets = Outcomes(), list(RECIPES)
        if args.only % 3 == 2:
            try_raw(args.seed + args.only, outcomes, stub_arguments())
        else:
            try_public(targets[args.only % len(targets)], args.seed + args.only, outcomes)
    else:
        outcomes = run(args.calls, args.seed, limit_memory=not args.sanitized)
    if args.outcomes is not None:
        found = {"counts": outcomes.counts, "findings": outcomes.findings}
        args.outcomes.write_text(json.dumps(found))
    for finding in outcomes.findings:
        sys.stdout.write(finding + "\n")
    sys.stdout.write(f"{len(outcomes.findings)} findings\n")
    return int(bool(outcomes.findings))


if __name__ == "__main__":
    sys.exit(main())
