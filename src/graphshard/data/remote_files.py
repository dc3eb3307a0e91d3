# SPDX-License-Identifier: Apache-2.0
"""Files that are not on this machine: what a URI means, and why it cannot be opened, in one line.

`pyarrow.fs` opens them, and gives up after a minute or two where a host does not answer.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}  # as Hadoop and fsspec write them
_GCS_SECONDS = 60  # in which a request is tried again; by itself it is 15 minutes
_AZURE = "run az login, or set AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET"
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run gcloud auth application-default login, or, of a public bucket, write "
    "gs://anonymous@bucket/...",
    **dict.fromkeys(("abfs", "abfss"), _AZURE),
}
_NO_ANSWER = {
    "s3": "check the network and the region, or of another store than Amazon's name its host: "
    "s3://bucket/...?endpoint_override=HOST:PORT&scheme=http",
    "gs": "check the network, or name another host: "
    "gs://bucket/...?endpoint_override=HOST:PORT&scheme=http",
}
_IS_REFUSED = re.compile(
    "access_?denied|unauthenticated|permission_?denied|accesskey|access_key|signature|credential"
    "|token",
    re.IGNORECASE,
)
_IS_SILENT = re.compile("network_?connection|curl|resolv|unavailable|deadline", re.IGNORECASE)
_OPTIONS = re.compile(r"\?(?=\w+=)")  # where those of a URI begin
_MOST_LETTERS = 300
_LEFT_AS_THEY_ARE = "/%@:+=,!$&'()*;"
_JAVA = (
    "install Java and Hadoop, and set JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath "
    "--glob), or copy the files by hadoop fs -get"
)


def is_uri(text: str) -> bool:
    """Whether a path names the system on which it is."""
    return "://" in text


def open_uri(text: str) -> tuple[Any, str]:
    """The `pyarrow.fs` file system of a URI, and the path there, in which globs are as written.

    Raises:
        ValueError: The URI is none, or its file system cannot be opened.
    """
    from pyarrow import fs

    scheme, _, rest = text.partition("://")
    scheme = _ALIASES.get(scheme, scheme)
    # A question mark in a name is a glob; options begin with NAME=.
    place, *with_mark = _OPTIONS.split(rest, maxsplit=1)
    options = "".join(with_mark)
    parts = place.split("/")
    plain = next((i for i, part in enumerate(parts) if i and set(part) & set("*?[")), len(parts))
    folder = quote("/".join(parts[:plain]), safe=_LEFT_AS_THEY_ARE) or "/"
    globs = [unquote(part) for part in parts[plain:]]
    if scheme == "gs" and "retry_limit_seconds=" not in options:
        options = "&".join(filter(None, [options, f"retry_limit_seconds={_GCS_SECONDS}"]))
    query = f"?{options}" if options else ""
    with remote_errors(text):
        system, path = fs.FileSystem.from_uri(f"{scheme}://{folder}{query}")
    return system, "/".join([path, *globs])


def read_file(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a file, on this machine or where a URI says.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read, as a folder.
        ValueError: A URI is none, or its file system cannot be read.
    """
    text = os.fspath(path)
    if not is_uri(text):
        try:
            return Path(text).read_bytes()
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"there is no file {text}") from None
            raise type(error)(f"{text} cannot be read ({error.strerror}); give a file") from None
    system, place = open_uri(text)
    with remote_errors(text):
        try:
            with system.open_input_stream(place) as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {shown(text)}") from None
    return content


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file, on this machine or where a URI says.

    Raises:
        ValueError: A URI is none, or its file system cannot be read.
    """
    text = os.fspath(path)
    if not is_uri(text):
        return Path(text).is_file()
    from pyarrow import fs

    system, place = open_uri(text)
    with remote_errors(text):
        found: bool = system.get_file_info(place).type == fs.FileType.File
    return found


def without_options(path: str) -> PurePosixPath:
    """A path, or a URI without its options: what has the ending of the file."""
    return PurePosixPath(_OPTIONS.split(path, maxsplit=1)[0] if is_uri(path) else path)


def folder_of(file: str | os.PathLike[str]) -> str:
    """The folder of a file, which may be a URI; its options stay."""
    text = os.fspath(file)
    if not is_uri(text):
        return os.path.dirname(text)
    place, *options = _OPTIONS.split(text, maxsplit=1)
    return "?".join([place.rpartition("/")[0], *options])


def in_folder(folder: str | os.PathLike[str], path: str) -> str:
    """A path as it is seen from a folder; either may be a URI.

    Of ``..`` and ``.`` nothing is left in a URI: in a bucket no name goes back.
    """
    text = os.fspath(folder)
    if is_uri(path) or not is_uri(text):
        return path if is_uri(path) else os.path.join(text, path)
    place, *options = _OPTIONS.split(text, maxsplit=1)
    scheme, _, whole = f"{place.rstrip('/')}/{path}".partition("://")
    if {".", ".."} & set(path.split("/")):
        whole = posixpath.normpath(whole)
    return "?".join([f"{scheme}://{whole}", *options])


def name_of(text: str, place: str, path: str) -> str:
    """What a file is called in messages: as what a user wrote begins, without options and keys.

    Args:
        text: What was written: a path or URI of the file, of a folder around it, or a glob.
        place: The path of that on its file system, as of `open_uri`.
        path: That of the file there.
    """
    if not is_uri(text):
        return path
    said = _OPTIONS.split(text, maxsplit=1)[0].rstrip("/")
    pairs = zip(reversed(said), reversed(place), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Both end alike; the rest is how they begin.
    return shown(said[: len(said) - same] + path.removeprefix(place[: len(place) - same]))


def shown(text: str) -> str:
    """A URI without the keys that may be in it."""
    return re.sub(r"(://[^/@:]*):[^@]*@", r"\1:***@", text)


@contextlib.contextmanager
def remote_errors(text: str) -> Iterator[None]:
    """Say of errors meanwhile, where a path is a URI, what could not be read, and the cure.

    Raises:
        ValueError: In place of what pyarrow raises, but for a file that is not there.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError) or not is_uri(text):
            raise
        scheme = text.partition("://")[0]
        reason, cure = _said(
            _ALIASES.get(scheme, scheme), shown(" ".join(str(error).split()).rstrip("."))
        )
        raise ValueError(f"{shown(text)} cannot be read: {reason}; {cure}") from error


def _said(scheme: str, reason: str) -> tuple[str, str]:
    """The reason of an error in a few words, and what helps."""
    if "libjvm" in reason or "libhdfs" in reason:
        return "Hadoop needs libjvm and libhdfs, and one of them is not there", _JAVA
    if "Unrecognized filesystem type" in reason:
        return (
            f"the system must be s3, gs, hdfs, abfs or file (got {scheme})",
            "download the files, and give their paths",
        )
    cure = "check the URI"
    if re.search(_IS_REFUSED, reason):
        cure = _CREDENTIALS.get(scheme, "give credentials")
    elif re.search(_IS_SILENT, reason):
        cure = _NO_ANSWER.get(scheme, "check the network")
    return (reason if len(reason) < _MOST_LETTERS else f"{reason[:_MOST_LETTERS]}..."), cure
