# SPDX-License-Identifier: Apache-2.0
"""TOML: reading a file with errors of one line, and writing plain values."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ValueError: It is not TOML; says where.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        return toml_values(file.read(), os.fspath(path))


def toml_values(content: bytes, name: str) -> dict[str, Any]:
    """The values of TOML.

    Args:
        name: Of the file, for errors.

    Raises:
        ValueError: It is not TOML; says where.
    """
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not TOML ({error})") from None


def toml_text(values: Mapping[str, Any]) -> str:
    """TOML of values: tables of tables to any depth; what is None is left out."""
    lines: list[str] = []
    _write_table(lines, values, ())
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(lines: list[str], values: Mapping[str, Any], path: tuple[str, ...]) -> None:
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    plain = {k: v for k, v in values.items() if k not in tables and v is not None}
    if path and (plain or not tables):
        lines += ["", "[" + ".".join(map(_key, path)) + "]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, table in tables.items():
        _write_table(lines, table, (*path, key))


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else f"{'-' if value < 0 else ''}inf"
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _text(os.fspath(value))
