# SPDX-License-Identifier: Apache-2.0
"""PickleMachine: reads files that other libraries write as pickles, without unpickling.

A pickle is a program for a stack machine that may call anything. This machine knows the
instructions by which plain values are written down (numbers, strings, tuples, lists, dictionaries),
and looks up no name: what a name, a call, a state or a reference means, a subclass says for the few
that its files have. All else is an error, and so is a length that the file does not have.
"""

from __future__ import annotations

import codecs
import struct
from typing import Any

_MARK = object()
_KEYS = (int, str, bytes, type(None))


class PickleMachine:
    """One file's program, of a protocol up to 4."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    # ------------------------------------------------------------------ what subclasses say

    def named(self, module: str, name: str) -> Any:
        """What stands for a name; a subclass raises ValueError for all but its own."""
        raise ValueError(f"the name {module:.60}.{name:.60}, which is none that these files have")

    def called(self, function: Any, arguments: Any) -> Any:
        """What a call of something that `named` returned gives."""
        raise ValueError("a call, which these files do not have")

    def stated(self, value: Any, state: Any) -> None:
        """Give something that `called` returned its state."""
        raise ValueError("a state of what has none")

    def referred(self, reference: Any) -> Any:
        """What a reference to something beside the pickle stands for."""
        raise ValueError("a reference, which these files do not have")

    # ------------------------------------------------------------------ the machine

    def run(self) -> Any:
        """The value.

        Raises:
            ValueError: The pickle is damaged, or has something that plain values do not need.
            IndexError, KeyError, TypeError, OverflowError, struct.error, UnicodeError: It is
                damaged.
        """
        while True:
            code = self._take(1)
            if code == b".":
                if len(self._stack) != 1:
                    raise ValueError("it ends in the middle of a value")
                return self._pop()
            self._step(code)

    def _take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise ValueError("it is cut short")
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise ValueError("it is cut short")
        return self._take(end + 1 - self._at)[:-1]

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def _to_mark(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _top(self, kind: type | None = None) -> Any:
        value = self._stack[-1]
        if value is _MARK or (kind is not None and type(value) is not kind):
            raise ValueError(f"a {'value' if kind is None else kind.__name__} is missing")
        return value

    def _step(self, code: bytes) -> None:
        push = self._stack.append
        if code in _READ:
            push(self._read(code))
        elif code == b"\x80":
            if self._number("<B") > 4:
                raise ValueError("it is of a newer protocol")
        elif code == b"\x95":
            self._take(8)
        elif code == b"(":
            push(_MARK)
        elif code in b"tld":
            items = self._to_mark()
            if code == b"d":
                push(_pairs(items))
            else:
                push(tuple(items) if code == b"t" else items)
        elif code in b")]}":
            push({b")": (), b"]": [], b"}": {}}[code])
        elif code in b"\x85\x86\x87":
            items = [self._pop() for _ in range(code[0] - 0x84)]
            push(tuple(items[::-1]))
        elif code == b"0":
            self._pop()
        elif code in b"qrp\x94":
            number = self._memo_number(code)
            self._memo[number] = self._top()
        elif code in b"hjg":
            push(self._memo[self._memo_number(code)])
        elif code in b"ae":
            items = [self._pop()] if code == b"a" else self._to_mark()
            self._top(list).extend(items)
        elif code in b"su":
            items = [self._pop(), self._pop()][::-1] if code == b"s" else self._to_mark()
            self._top(dict).update(_pairs(items))
        elif code in b"R\x81":
            arguments, function = self._pop(), self._pop()
            if not isinstance(arguments, tuple):
                raise ValueError("a call without arguments")
            push(self.called(function, arguments))
        elif code == b"b":
            state = self._pop()
            self.stated(self._top(), state)
        elif code == b"Q":
            push(self.referred(self._pop()))
        elif code == b"c":
            module, name = self._line().decode("ascii"), self._line().decode("ascii")
            push(self.named(module, name))
        elif code == b"\x93":
            name, module = self._pop(), self._pop()
            push(self.named(str(module), str(name)))
        else:
            raise ValueError(f"an instruction {code!r} that plain values do not need")

    def _memo_number(self, code: bytes) -> int:
        if code in b"pg":
            return int(self._line())
        if code == b"\x94":
            return len(self._memo)
        return int(self._number("<B" if code in b"qh" else "<I"))

    def _read(self, code: bytes) -> Any:
        layout = _READ[code]
        if layout is None:
            return {b"N": None, b"\x88": True, b"\x89": False}[code]
        if layout == "line":
            return self._text_number(code)
        if layout == "escaped":
            return self._line().decode("raw-unicode-escape")
        if layout == "quoted":
            text = self._line()
            if len(text) < 2 or text[:1] not in b"'\"" or text[-1:] != text[:1]:
                raise ValueError("a string without quotes")
            return codecs.escape_decode(text[1:-1])[0]
        if code == b"\x8a":
            return int.from_bytes(self._take(self._number("<B")), "little", signed=True)
        if code in b"UTCBX\x8c":
            raw = self._take(self._number(layout))
            return raw.decode("utf-8") if code in b"X\x8c" else raw
        return self._number(layout)

    def _text_number(self, code: bytes) -> Any:
        text = self._line()
        if code == b"F":
            return float(text)
        if text in (b"00", b"01"):
            return text == b"01"
        if len(text) > 32:
            raise ValueError("a number of too many digits")
        return int(text.rstrip(b"L"))


_READ: dict[bytes, str | None] = {
    b"N": None,
    b"\x88": None,
    b"\x89": None,
    b"I": "line",
    b"L": "line",
    b"F": "line",
    b"S": "quoted",
    b"V": "escaped",
    b"J": "<i",
    b"K": "<B",
    b"M": "<H",
    b"G": ">d",
    b"\x8a": "<B",
    b"U": "<B",
    b"C": "<B",
    b"\x8c": "<B",
    b"T": "<i",
    b"B": "<I",
    b"X": "<I",
}
"""Instructions that read a value: its layout, or that of its length."""


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    pairs = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not all(isinstance(part, _KEYS) for part in (key if type(key) is tuple else (key,))):
            raise ValueError("a key that is no number and no string")
        pairs[key] = value
    return pairs
