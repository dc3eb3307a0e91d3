# SPDX-License-Identifier: Apache-2.0
"""Tables in a bucket: a small S3 server in a thread of this process; nothing leaves the machine."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pandas as pd
import pyarrow.fs
import pytest

from graphshard.data._read_tables import read_tables
from graphshard.data._table_files import TableSource, find_files
from graphshard.data.remote_files import open_uri, shown
from graphshard.data.tables import EdgeTable, NodeTable, Tables
from graphshard.train._predict import PredictRequest
from graphshard.train._prediction_files import read_columns, read_ids
from graphshard.train.commands import run

pytestmark = pytest.mark.skipif(
    not hasattr(pyarrow.fs, "S3FileSystem"), reason="pyarrow was built without S3"
)

FOLLOWS = pd.DataFrame({"from": list("abcde"), "to": list("bcdea"), "hours": [1, 2, 3, 4, 5]})
DAYS = {day: FOLLOWS[day::2] for day in (0, 1)}


def _objects() -> dict[str, bytes]:
    """Key to content."""
    made = {"users.csv": b"user,age\na,1\nb,2\nc,\nd,4\ne,5\n"}
    made["gz/follows.csv.gz"] = gzip.compress(FOLLOWS.to_csv(index=False).encode())
    made["a b/ü#1.csv"] = FOLLOWS.to_csv(index=False).encode()
    for day, rows in DAYS.items():
        made[f"days/day={day}/part-0.parquet"] = rows.to_parquet(index=False)
        made[f"parts/part-{day}.parquet"] = rows.to_parquet(index=False)
    made["days/_SUCCESS"] = b""
    made["said/graph.toml"] = b"""
[nodes.user]
files = "../users.csv"
id = "user"
[edges.follows]
files = "gz/*"
source = "from"
target = "to"
"""
    made["said/gz/follows.csv.gz"] = made["gz/follows.csv.gz"]
    made["said/run.toml"] = b"epochs = 3"
    made["said/ids.txt"] = b"a\nb\na\n"
    made["said/pairs.csv"] = b"source,target\na,b\n"
    return made


class _Bucket(BaseHTTPRequestHandler):
    """The requests of S3 by which objects are read: HEAD, GET and ListObjectsV2."""

    protocol_version = "HTTP/1.1"
    objects = _objects()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        options = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if bucket == "locked":
            self._send(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif bucket != "shop":
            self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif key == "":
            self._send(200, self._listed(options))
        elif key not in self.objects:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            first, _, last = (
                self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            )
            content = self.objects[key]
            end = min(int(last), len(content) - 1) if last else len(content) - 1
            piece = content[int(first) : end + 1]
            more = {"Content-Range": f"bytes {first}-{end}/{len(content)}"}
            is_part = "Range" in self.headers
            self._send(206 if is_part else 200, piece, more if is_part else {})

    def _listed(self, options: dict[str, str]) -> bytes:
        prefix, delimiter = options.get("prefix", ""), options.get("delimiter", "")
        names = [key for key in self.objects if key.startswith(prefix)]
        folders = {
            prefix + key[len(prefix) :].partition("/")[0] + "/"
            for key in names
            if delimiter and delimiter in key[len(prefix) :]
        }
        files = [key for key in names if not (delimiter and delimiter in key[len(prefix) :])]
        made = [
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.objects[k])}</Size></Contents>"
            for k in files
        ]
        made += [f"<CommonPrefixes><Prefix>{escape(k)}</Prefix></CommonPrefixes>" for k in folders]
        return f"<ListBucketResult>{''.join(made)}</ListBucketResult>".encode()

    def _send(self, status: int, content: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def options() -> Iterator[str]:
    """What a URI needs to find the server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"?endpoint_override=127.0.0.1:{server.server_port}&scheme=http&region=us-east-1"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    for name in ("http_proxy", "HTTP_PROXY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "place",
    [
        "s3://shop/gz/follows.csv.gz",
        "s3a://shop/a b/ü#1.csv",
        "s3://shop/days",
        "s3://shop/days/day=*/*.parquet",
        "s3://shop/parts/part-?.parquet",
        "s3://shop/parts/part-[01].parquet",
        "s3://testing:secret@shop/gz/*",
    ],
)
def test_tables_in_a_bucket(place: str, options: str) -> None:
    tables = Tables(
        nodes={"user": NodeTable(files=f"s3://shop/users.csv{options}", id="user")},
        edges={
            ("user", "follows", "user"): EdgeTable(
                files=place + options, source="from", target="to", weight="hours"
            )
        },
    )
    graph = read_tables(tables).graph
    src, dst = graph.edges()
    ids = list("abcde")
    weight = graph.edata["weight"].tolist()
    found = [(ids[u], ids[v], w) for u, v, w in zip(src, dst, weight, strict=True)]
    assert sorted(found) == sorted(FOLLOWS.itertuples(index=False, name=None))
    assert "day" in TableSource(place + options).schema.names or "days" not in place


def test_files_and_rows_are_called_as_they_were_given(options: str) -> None:
    for place, name in (
        ("s3://shop/users.csv", "s3://shop/users.csv"),
        ("s3a://shop/a%20b/*.csv", "s3a://shop/a%20b/ü#1.csv"),
        ("s3://testing:secret@shop/days/", "s3://testing:***@shop/days/day=0/part-0.parquet"),
        ("s3://shop/days/day=*/*.parquet", "s3://shop/days/day=0/part-0.parquet"),
    ):
        assert TableSource(place + options).files[0] == name
    tables = Tables(
        nodes={"user": NodeTable(files=f"s3://shop/users.csv{options}", id="age")},
        edges={
            ("user", "follows", "user"): EdgeTable(
                files=f"s3://shop/days{options}", source="from", target="to"
            )
        },
        dangling="add",
    )
    (row,) = read_tables(tables).report.first
    assert (row.file, row.row) == ("s3://shop/users.csv", 3)
    edges = EdgeTable(files="days", source="from", target="none")
    with pytest.raises(
        ValueError, match=r"^s3://shop/days/day=0/part-0.parquet and others: column"
    ):
        read_tables(Tables(edges={("u", "e", "u"): edges}, base=f"s3://shop/{options}"))


WRONG = {
    "s3://shop/nobody.csv": "there is no file or folder s3://shop/nobody.csv",
    "s3://shop/parts/x*": "no file fits s3://shop/parts/x*",
    "s3://key:secret@shop/x": "there is no file or folder s3://key:***@shop/x",
    "s3://locked/x.csv": "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "s3://k:se/cret@shop/x": "s3://k:***@shop/x",
    "https://shop/x.csv": "the system must be s3, gs, hdfs, abfs or file (got https); download",
}


@pytest.mark.parametrize("place", WRONG)
def test_what_cannot_be_read_is_said_in_a_line(place: str, options: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        find_files(place + options)
    text = str(error.value)
    assert WRONG[place] in text
    assert "\n" not in text
    assert "cret" not in text


@pytest.mark.skipif(not hasattr(pyarrow.fs, "HadoopFileSystem"), reason="built without Hadoop")
def test_hadoop_without_java_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(
        ValueError, match=r"libhdfs.*CLASSPATH=\$\(hadoop classpath --glob\)"
    ) as error:
        open_uri("hdfs://127.0.0.1:1/users.csv")
    assert len(str(error.value)) < 400


@pytest.mark.skipif(not hasattr(pyarrow.fs, "GcsFileSystem"), reason="built without GCS")
def test_a_silent_google_is_not_waited_for_longer_than_asked() -> None:
    bounded, path = open_uri("gs://anonymous@shop/a/*.csv")
    same = pyarrow.fs.FileSystem.from_uri("gs://anonymous@shop/a?retry_limit_seconds=60")[0]
    assert bounded.equals(same)
    assert path == "shop/a/*.csv"
    said, _ = open_uri("gcs://anonymous@shop/a?retry_limit_seconds=7")
    assert not said.equals(bounded)


def test_other_files_that_commands_read_may_be_elsewhere(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "s3://shop/said/{}" + options
    read = read_tables(Tables.from_toml(place.format("graph.toml")))
    assert read.graph.num_edges() == len(FOLLOWS)
    assert read_ids(place.format("ids.txt"), pyarrow.string())[0].to_pylist() == ["a", "b"]
    names, types = ["source", "target"], [pyarrow.string()] * 2
    table, _ = read_columns(place.format("pairs.csv"), names, types)
    assert table.to_pylist() == [{"source": "a", "target": "b"}]
    PredictRequest(data="x", run="x", pairs=place.format("pairs.csv"))
    for field in ("pairs", "nodes"):
        with pytest.raises(ValueError, match=rf"{field} must be .*s3://shop/said/none.csv"):
            PredictRequest(data="x", run="x", **{field: place.format("none.csv")})
    for command in ("train", "partition --parts 1 --out out --tables"):
        words = [*command.split(), place.format("none.toml")]
        words[1:1] = ["--data", "cora", "--config"] if command == "train" else []
        assert run(words) == 2
        assert "there is no file" in capsys.readouterr().err
    assert run(["train", "--config", place.format("run.toml"), "--data", str(tmp_path)]) == 2
    assert "is no node data set" in capsys.readouterr().err
    assert run(["train", "--config", place.format("ids.txt"), "--data", "cora"]) == 2
    assert "ids.txt" in (error := capsys.readouterr().err)
    assert "is not TOML" in error


def test_the_server_may_be_named_by_the_environment(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = parse_qs(options.removeprefix("?"))["endpoint_override"][0]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}")
    assert len(TableSource("s3://shop/days?region=us-east-1").files) == len(DAYS)


def test_a_relation_in_a_bucket_is_called_as_its_folder(options: str) -> None:
    tables = Tables.from_files((), [f"s3://shop/days/day=*/*.parquet{options}"])
    assert [name for _, name, _ in tables.edges] == ["days"]


def test_keys_are_not_shown() -> None:
    assert shown("s3://id:se/c@bucket/a@b") == "s3://id:***@bucket/a@b"
    assert shown("/data/a:b@c") == "/data/a:b@c"
