# SPDX-License-Identifier: Apache-2.0
"""Rates: how fast a machine is, and what a process takes there before it has read anything."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .._base.files import read_json_regular, writing

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one rank does in a second beside ``num_ranks - 1`` others of its host.

    Args:
        product: Multiplications and additions of rows times matrices.
        weights: The same of gradients of matrices.
        edges: Bytes that sums read along edges.
        attention: The same of attention.
        elements: Bytes of everything else.
        random: Numbers drawn, as for dropout.
        pages: Bytes of memory that the system hands out, at their first touch.
        start: Seconds of an operation as such, and of the step around it.
        sampled: Edges drawn.
        exchange: Bytes exchanged between ranks of one host.
        latency: Seconds of an exchange as such.
        interpreter: Bytes of a process that trains a tiny graph.
        own: How much of that is the process's own: without pages of files, which libraries are in.
        network: What an epoch of the network that is planned computed for, on a sample of its
            graph, over what the rates above say of it but for ``pages``: caches, the order of
            nodes, and all else that work done over and over does not show.
        spread: Rate to the share by which its measurements differ from it.
        fewer: The same of fewer ranks beside each other, with more threads each.
        source: Where the rates are from.
    """

    product: float = 4.0e10
    weights: float = 4.5e10
    edges: float = 4.0e9
    attention: float = 3.0e9
    elements: float = 8.0e9
    random: float = 9.0e7
    pages: float = 2.1e9
    start: float = 2.0e-5
    sampled: float = 1.5e6
    exchange: float = 1.3e9
    latency: float = 2.0e-4
    interpreter: float = 4.2e8
    own: float = 2.0e8
    network: float = 1.0
    num_ranks: int = 1
    threads: int = 1
    spread: Mapping[str, float] = field(default_factory=dict)
    fewer: tuple[Rates, ...] = ()
    source: str = "2 cores of an AMD EPYC, 2026-11-26"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `read_rates` reads."""
        with writing(Path(path)):
            Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def beside(self, num_ranks: int) -> Rates:
        """Those of so many ranks on a host, or of as many as were measured below that."""
        known = sorted((self, *self.fewer), key=lambda rates: rates.num_ranks)
        return next((r for r in reversed(known) if r.num_ranks <= num_ranks), known[0])

    @property
    def uncertainty(self) -> float:
        """Share by which a time made of these rates may be off: at least what epochs were."""
        shares = [self.spread[name] for name in _OF_COMPUTATION if name in self.spread]
        least = _OFF_TRIED if self.network != 1.0 else _OFF_UNTRIED
        return max(least, statistics.median(shares)) if shares else _OFF_UNMEASURED


_OFF_TRIED, _OFF_UNTRIED, _OFF_UNMEASURED = 0.15, 0.5, 1.0
"""How far epochs were from plans: of rates with a trial of the network, without, and of others."""

_OF_COMPUTATION = "product", "weights", "edges", "attention", "elements", "random", "pages"


def read_rates(path: str | os.PathLike[str]) -> Rates:
    """Read what `Rates.save` wrote.

    Raises:
        FileNotFoundError: There is none.
        ValueError: Not such a file; says which entry is wrong.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"there is no file of rates {path}; write one with graphshard plan --save-rates"
        )
    try:
        content = read_json_regular(Path(path))
    except ValueError as error:
        raise _no_rates(path, f" ({error})") from None
    return _rates_of(content, path)


def _no_rates(path: str | os.PathLike[str], why: str = "") -> ValueError:
    rule = f"{path} must hold rates as graphshard plan --save-rates writes them{why}"
    return ValueError(f"{rule}; write it again")


def _rates_of(content: Any, path: str | os.PathLike[str]) -> Rates:
    known = {item.name for item in fields(Rates)}
    if not isinstance(content, dict) or not content.keys() <= known:
        raise _no_rates(path)
    content = dict(content)
    fewer = content.pop("fewer", [])
    for name, value in content.items():
        _check(name, value, path)
    return replace(Rates(), **content, fewer=tuple(_rates_of(each, path) for each in fewer))


def _check(name: str, value: Any, path: str | os.PathLike[str]) -> None:
    if name == "source":
        is_right = isinstance(value, str)
    elif name == "spread":
        is_right = isinstance(value, dict) and all(_is_number(v, 0) for v in value.values())
    else:
        is_right = _is_number(value, 0) and value > 0
    if not is_right:
        raise ValueError(
            f"{path}: {name} must be a number above 0 (got {value!r}); measure rates again with "
            "graphshard plan --save-rates"
        )


def _is_number(value: Any, least: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value < float("inf")


def parse_bytes(text: str, option: str = "memory") -> float:
    """A number of bytes: 64GiB, 512MB, 1e9.

    Raises:
        ValueError: Not such a text.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    number = _number(found.group(1)) if found else None
    if found is None or number is None or number <= 0:
        raise ValueError(
            f"{option} must be a number of bytes above 0, such as 64GiB (got {text!r})"
        )
    unit = found.group(2) or ""
    return number * (_BINARY[unit] if unit in _BINARY else _UNITS[unit])


def parse_link(text: str) -> float:
    """Bytes a second of a link: 10Gbit/s, 400Mbit, 1.2GB/s.

    Raises:
        ValueError: Not such a text.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([kKmMgGtT])?(bit|bps|b|B)(?:/s|ps)?\s*", text)
    number = _number(found.group(1)) if found else None
    if found is None or number is None or number <= 0:
        raise ValueError(f"link must be a rate such as 10Gbit/s or 1.2GB/s (got {text!r})")
    unit = (found.group(2) or "").lower()
    return number * _UNITS[unit] / (1 if found.group(3) == "B" else 8)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
