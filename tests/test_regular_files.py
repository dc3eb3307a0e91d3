# SPDX-License-Identifier: Apache-2.0
"""Opening files of others: never a wait, and one kind of error. No process group."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from graphshard._base.files import (
    NotRegularFileError,
    check_regular,
    open_regular,
    parse_json,
    read_json_regular,
    read_text_regular,
)


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("größe".encode())
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        assert read_text_regular(tmp_path / name) == "größe"
        with open_regular(tmp_path / name) as file:
            assert file.read() == path.read_bytes()
            assert os.get_blocking(file.fileno())
        assert check_regular(tmp_path / name).st_size == len(path.read_bytes())


def open_within_a_deadline(path: Path) -> BaseException | None:
    """What opening raises, in a thread that a pipe may hold for ever."""
    found: list[BaseException] = []

    def work() -> None:
        try:
            open_regular(path).close()
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), f"opening {path} waits"
    return found[0] if found else None


def test_pipes_sockets_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name, kind, text in (
        ("pipe", NotRegularFileError, "a named pipe, not a regular file"),
        ("link", NotRegularFileError, "a named pipe, not a regular file"),
        ("folder", IsADirectoryError, "folder"),
        ("dangling", FileNotFoundError, "dangling"),
        ("loop", OSError, "loop"),
        ("x" * 300, OSError, "too long"),
        ("a\0b", FileNotFoundError, "no file can have this name"),
    ):
        error = open_within_a_deadline(tmp_path / name)
        assert isinstance(error, kind), name
        assert text in str(error)
    error = open_within_a_deadline(Path("/dev/zero"))
    assert isinstance(error, NotRegularFileError)
    assert "a device" in str(error)


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")
        with pytest.raises(NotRegularFileError, match="a socket, not a regular file"):
            open_regular("s")


def test_a_file_that_becomes_a_pipe_after_the_look_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("x")
    looked_at = os.stat(path)
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(os, "stat", lambda *_, **__: looked_at)
    error = open_within_a_deadline(path)
    assert isinstance(error, NotRegularFileError)


def test_files_are_not_opened_for_writing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode must be 'rb' or 'r'"):
        open_regular(tmp_path / "a", "wb")
    assert not (tmp_path / "a").exists()


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, -2.5e3, null, true, "\\u00f6"]}')
    assert read_json_regular(tmp_path / "a.json") == {"a": [1, -2500.0, None, True, "ö"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": "\xff"}', "can't decode"),
        (b'{"a": 1, "b": 2, "a": 1}', "it has the key 'a' twice"),
        (b'{"a": NaN}', "NaN is not a number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is not a number of JSON"),
        (b'{"a": 1e999}', "the number 1e999 is out of range"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "integer string conversion"),
        (b"[" * 200_000, "it nests too deeply"),
        (b'{"a":' * 200_000, "it nests too deeply"),
    ],
)
def test_json_that_is_none_is_a_value_error(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_repetition_is_found_at_any_depth() -> None:
    nested: Any = '{"a": [{"b": {"c": 1, "c": 2}}]}'
    with pytest.raises(ValueError, match="'c' twice"):
        parse_json(nested)
