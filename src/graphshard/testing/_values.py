# SPDX-License-Identifier: Apache-2.0
"""Values between a test and its ranks: JSON for the structure, safetensors for the tensors.

::

    <stem>.json          the value, tensors replaced by their number
    <stem>.safetensors   {"0": tensor, "1": tensor, ...}; absent where there is none

None, bool, int, float, str, torch.dtype and tensors travel, and lists, tuples and dicts of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_value(stem: Path, value: object) -> None:
    """Write a value; files appear whole or not at all.

    Raises:
        TypeError: The value holds something that does not travel; names where.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode_value(value, tensors, "value"))
    if tensors:
        # Clones, because safetensors refuses tensors that share memory.
        save_file(tensors, stem.with_suffix(".safetensors"))
    partial = stem.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(stem.with_suffix(".json"))


def load_value(stem: Path) -> Any:
    """Read what `save_value` wrote."""
    file = stem.with_suffix(".safetensors")
    tensors = load_file(file) if file.exists() else {}
    return _decode(json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")), tensors)


def encode_value(value: object, tensors: dict[str, Tensor], where: str) -> object:
    """A value as JSON, called ``where`` in errors; ``tensors`` gets copies of its tensors."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        # A plain number, also where it came as a subclass (an IntEnum, a NumPy float64).
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"{where} is a {value.layout} tensor; only dense tensors travel")
        number = str(len(tensors))
        tensors[number] = value.detach().cpu().contiguous().clone()
        return {"tensor": number}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        items = [encode_value(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        keys = [encode_value(k, tensors, f"a key of {where}") for k in value]
        values = [encode_value(v, tensors, f"{where}[{k!r}]") for k, v in value.items()]
        return {"dict": list(zip(keys, values, strict=True))}
    raise TypeError(
        f"{where} is a {type(value).__name__}; only None, bool, int, float, str, torch.dtype and "
        "tensors, and lists, tuples and dicts of them, travel to and from ranks"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    return {_decode(k, tensors): _decode(v, tensors) for k, v in content}
