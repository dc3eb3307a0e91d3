# SPDX-License-Identifier: Apache-2.0
"""Mutations of a folder of files, each made from its number alone. No process.

`mutate` damages a copy of a folder in one place: a bit, a byte, a block of zeros, a length, a file
that is gone, exchanged with another or no regular file any more, or a value of a JSON file. The
same number does the same to the same files, so that a failure is told in full by its number.
``trials.py`` runs a function over many of them.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MARK = "\x00mutation\x00"
_EDGE = 1024
"""Bytes at the start and at the end of a file that are hit as often as all the rest: headers."""

_DEPTH = 100_000


def files_of(folder: Path) -> list[Path]:
    """Regular files under a folder, sorted by their path."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def mutate(folder: Path, number: int) -> str:
    """Damage one thing in ``folder``, in place; returns what was done, for a report.

    Args:
        folder: A copy that may be damaged. It holds at least one file.
        number: Which mutation.
    """
    rng = random.Random(number)
    path = rng.choice(files_of(folder))
    if path.suffix == ".json" and rng.random() < 0.6:
        done = mutate_json(path, rng)
    else:
        weights = [weight for _, weight in _KINDS]
        kind = rng.choices([kind for kind, _ in _KINDS], weights)[0]
        done = kind(path, folder, rng)
    return f"{number}: {path.relative_to(folder)}: {done}"


# ------------------------------------------------------------------------------------------ bytes


def _position(size: int, rng: random.Random) -> int:
    """A byte of a file; half of the time one near its start or its end."""
    where = rng.random()
    if where < 0.35:
        return rng.randrange(min(size, _EDGE))
    if where < 0.5:
        return size - 1 - rng.randrange(min(size, _EDGE))
    return rng.randrange(size)


def _flip_bit(path: Path, folder: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return _extend(path, folder, rng)
    at, bit = _position(len(content), rng), rng.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} flipped"


def _overwrite(path: Path, folder: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return _extend(path, folder, rng)
    at, new = _position(len(content), rng), rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    length = rng.choice([1, 1, 2, 4, 8])
    content[at : at + length] = bytes([new]) * len(content[at : at + length])
    path.write_bytes(content)
    return f"bytes {at} to {at + length} set to {new}"


def _zeros(path: Path, folder: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return _extend(path, folder, rng)
    at = _position(len(content), rng)
    length = min(len(content) - at, rng.choice([16, 512, 4096]))
    content[at : at + length] = bytes(length)
    path.write_bytes(content)
    return f"{length} zeros from byte {at}"


def _digit(path: Path, folder: Path, rng: random.Random) -> str:
    """Another digit in the header, or one more: a size or a shape that does not fit."""
    content = path.read_bytes()
    digits = [match.start() for match in re.finditer(rb"[0-9]", content[:_EDGE])]
    if not digits:
        return _flip_bit(path, folder, rng)
    at = rng.choice(digits)
    new = rng.choice([b"0", b"1", b"9", b"-", b"99999999", content[at : at + 1] + b"0"])
    path.write_bytes(content[:at] + new + content[at + 1 :])
    return f"digit at byte {at} replaced by {new.decode()}"


def _truncate(path: Path, folder: Path, rng: random.Random) -> str:
    size = path.stat().st_size
    keep = rng.choice([0, min(size, 1), min(size, 8), size // 2, max(0, size - 1), size])
    if keep == size:
        keep = rng.randrange(size) if size else 0
    os.truncate(path, keep)
    return f"truncated from {size} to {keep} bytes"


def _extend(path: Path, folder: Path, rng: random.Random) -> str:
    more = rng.choice([b"\0", b"\n", b"}", b"x", rng.randbytes(8), rng.randbytes(4096)])
    with open(path, "ab") as file:
        file.write(more)
    return f"{len(more)} bytes added"


# ------------------------------------------------------------------------------------------ files


def _delete(path: Path, folder: Path, rng: random.Random) -> str:
    path.unlink()
    return "deleted"


def _swap(path: Path, folder: Path, rng: random.Random) -> str:
    others = [other for other in files_of(folder) if other != path]
    alike = [other for other in others if other.suffix == path.suffix]
    if not others:
        return _delete(path, folder, rng)
    other = rng.choice(alike or others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"exchanged with {other.relative_to(folder)}"


def _pipe(path: Path, folder: Path, rng: random.Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return "replaced by a named pipe"


def _folder(path: Path, folder: Path, rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def _link(path: Path, folder: Path, rng: random.Random) -> str:
    target = rng.choice(["/dev/zero", "/dev/full", path.name, "nowhere", "..", "/proc/self/mem"])
    path.unlink()
    path.symlink_to(target)
    return f"replaced by a link to {target}"


def _rename(path: Path, folder: Path, rng: random.Random) -> str:
    """Another number in the name of the file, or of the folder that it is in."""
    parent = path.parent
    old = parent if parent != folder and rng.random() < 0.5 else path
    numbers = list(re.finditer(r"\d+", old.name))
    if numbers:
        found = rng.choice(numbers)
        other = str(int(found[0]) + rng.choice([-1, 1, 7])).zfill(len(found[0]))
        name = old.name[: found.start()] + other + old.name[found.end() :]
    else:
        name = old.name + "~"
    if (old.parent / name).exists():
        return _swap(path, folder, rng)
    old.rename(old.parent / name)
    return f"{old.relative_to(folder)} renamed to {name}"


_Kind = Callable[[Path, Path, random.Random], str]
_KINDS: list[tuple[_Kind, float]] = [
    (_flip_bit, 6),
    (_overwrite, 4),
    (_zeros, 2),
    (_digit, 4),
    (_truncate, 2),
    (_extend, 1),
    (_delete, 0.5),
    (_swap, 1),
    (_pipe, 0.5),
    (_folder, 0.3),
    (_link, 0.7),
    (_rename, 0.7),
]


# ------------------------------------------------------------------------------------------- JSON


def mutate_json(path: Path, rng: random.Random) -> str:
    """Change one value of a JSON file, or its form; returns what was done.

    The file stays syntactically valid JSON in Python's reading, which takes NaN and lone
    surrogates, except where its nesting is too deep.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return _flip_bit(path, path.parent, rng)
    places = list(_places(content, ()))
    if not places or rng.random() < 0.03:
        text = rng.choice(["", "null", "[]", "{}", "0", '"x"', "[" * _DEPTH, '{"a":' * _DEPTH])
        path.write_text(text)
        return f"the whole file is {text[:8]!r}"
    keys = rng.choice(places)
    holder = content
    for key in keys[:-1]:
        holder = holder[key]
    where, old = "/".join(map(str, keys)), holder[keys[-1]]
    change = rng.random()
    if change < 0.1:
        del holder[keys[-1]]
        path.write_text(json.dumps(content, indent=1))
        return f"{where} removed"
    if change < 0.2 and isinstance(holder, dict):
        # The new value comes last, and Python's reader takes the last.
        again = rng.random() < 0.6
        new = rng.choice(_values(old, rng))
        holder[_MARK + "key"] = _MARK
        text = json.dumps(content, indent=1).replace(json.dumps(_MARK), new)
        key = json.dumps(keys[-1] if again else "another")
        path.write_text(text.replace(json.dumps(_MARK + "key"), key))
        return f"{where} {'twice' if again else 'joined by another key'}, with {new[:40]}"
    new = rng.choice(_values(old, rng))
    holder[keys[-1]] = _MARK
    text = json.dumps(content, indent=1).replace(json.dumps(_MARK), new)
    path.write_text(text)
    return f"{where}: {json.dumps(old)[:40]} became {new[:40]}"


def _places(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value inside a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*keys, key)
        yield from _places(inner, (*keys, key))


def _values(old: Any, rng: random.Random) -> list[str]:
    """JSON texts that could stand in place of a value."""
    anything = [
        *["null", "true", "false", "[]", "{}", '""', '"text"', "0", "1", "-1", "0.5", "NaN"],
        *["Infinity", "-Infinity", "1e400", "3000000000", str(2**63), str(-(2**63)), str(10**30)],
        *['"\\ud800"', '"a\\u0000b"', '"../../elsewhere"', '"/etc/passwd"', "1" * 5000],
        "[" * _DEPTH + "]" * _DEPTH,
        '{"a":' * _DEPTH + "0" + "}" * _DEPTH,
    ]
    near: list[Any] = []
    if isinstance(old, bool):
        near = [not old, int(old)]
    elif isinstance(old, int | float):
        near = [old + 1, old - 1, -old, old * 2, old + 0.5, float(old), str(old), [old]]
    elif isinstance(old, str) and old:
        at = rng.randrange(len(old))
        other = rng.choice("0123456789abcdef_/.")
        near = [old[:at] + other + old[at + 1 :], old[:at], old + other, old.upper(), [old]]
    elif isinstance(old, list):
        near = [[], old[:-1], old + old[-1:], old[::-1], [*old, 0], {"0": old}]
    elif isinstance(old, dict):
        near = [{}, list(old), list(old.values()), dict(list(old.items())[1:])]
    texts = [json.dumps(value) for value in near if value != old or type(value) is not type(old)]
    return texts if texts and rng.random() < 0.5 else anything
