# SPDX-License-Identifier: Apache-2.0
"""A server answers, refuses and lives on; a client waits no longer than it said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest
import torch
from clusters import TOKEN

from graphshard.errors import MessageError, ServerError
from graphshard.store import FlightConnection, MessageServer, WireMessage

COMMAND = flight.FlightDescriptor.for_command(b"graphshard 1")
HEADERS = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
BYTES = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])


def double(request: WireMessage) -> WireMessage:
    return WireMessage("doubled", request.fields, [2 * t for t in request.tensors])


def fail(request: WireMessage) -> WireMessage:
    if request.fields["how"] == "index":
        raise IndexError("ids must be below 3 (got 4)")
    raise RuntimeError("a fault of the server")


RELEASED = threading.Event()


def hang(request: WireMessage) -> WireMessage:
    RELEASED.wait(30)
    return WireMessage("late")


@pytest.fixture
def server() -> Iterator[MessageServer]:
    RELEASED.clear()
    handlers = {"double": double, "fail": fail, "hang": hang, "ping": lambda _: WireMessage("ok")}
    made = MessageServer(handlers, TOKEN, max_message=1 << 20)
    yield made
    RELEASED.set()
    made.stop()


@pytest.fixture
def client(server: MessageServer) -> Iterator[FlightConnection]:
    connection = FlightConnection(f"127.0.0.1:{server.port}", TOKEN, 3, timeout=20)
    yield connection
    connection.close()


def test_it_answers(client: FlightConnection) -> None:
    found = client.call(WireMessage("double", {"a": 1}, [torch.arange(5), torch.ones(2, 3)]))
    assert found.op == "doubled"
    assert found.fields == {"a": 1}
    assert found.tensors[0].tolist() == [0, 2, 4, 6, 8]


def test_several_requests_travel_at_a_time(client: FlightConnection) -> None:
    waiting = client.start(WireMessage("hang"))
    found = [client.start(WireMessage("double", {}, [torch.tensor([i])])) for i in range(20)]
    assert [int(each.result().tensors[0]) for each in found] == list(range(0, 40, 2))
    RELEASED.set()
    assert waiting.result().op == "late"


def test_what_a_handler_raises_its_caller_gets(client: FlightConnection) -> None:
    with pytest.raises(IndexError, match=r"ids must be below 3 \(got 4\)"):
        client.call(WireMessage("fail", {"how": "index"}))
    with pytest.raises(ServerError, match="of host 3 .* failed: RuntimeError: a fault"):
        client.call(WireMessage("fail", {"how": "other"}))
    with pytest.raises(MessageError, match="unknown request 'other'"):
        client.call(WireMessage("other"))
    assert client.call(WireMessage("ping")).op == "ok"


def test_a_request_that_is_too_long_is_refused(client: FlightConnection) -> None:
    with pytest.raises(MessageError, match=r"at most 1048576 bytes \(got 1600000\)"):
        client.call(WireMessage("double", {}, [torch.zeros(200_000, dtype=torch.float64)]))
    assert client.call(WireMessage("ping")).op == "ok"


def test_a_server_that_does_not_answer_is_an_error_in_time(client: FlightConnection) -> None:
    start = time.monotonic()
    with pytest.raises(ServerError, match="of host 3 .* did not answer 'hang' within 0.5 s"):
        client.call(WireMessage("hang"), timeout=0.5)
    assert time.monotonic() - start < 15
    assert client.call(WireMessage("ping")).op == "ok"


@pytest.mark.parametrize("token", ["", "another token, as long as the other"])
def test_who_does_not_know_the_token_is_refused(
    server: MessageServer, client: FlightConnection, token: str
) -> None:
    other = FlightConnection(f"127.0.0.1:{server.port}", token, 3, timeout=20)
    with pytest.raises(ServerError, match="of host 3 .* refused the token"):
        other.call(WireMessage("ping"))
    with pytest.raises(ServerError, match="refused the token"):
        other.wait_until_up(20)
    other.close()
    assert client.call(WireMessage("ping")).op == "ok"


def test_no_token_no_call(server: MessageServer) -> None:
    raw = flight.FlightClient(f"grpc://127.0.0.1:{server.port}")
    with pytest.raises(flight.FlightUnauthenticatedError):
        writer, reader = raw.do_exchange(COMMAND)
        writer.begin(BYTES)
        reader.read_chunk()
    for call in (raw.list_flights, lambda: raw.do_action("ping")):
        with pytest.raises(flight.FlightUnauthorizedError):
            list(call())


@pytest.mark.parametrize("what", ["command", "schema", "no header", "cut", "half a stream"])
def test_streams_that_are_none_are_refused(
    server: MessageServer, client: FlightConnection, what: str
) -> None:
    raw = flight.FlightClient(f"grpc://127.0.0.1:{server.port}")
    command = flight.FlightDescriptor.for_command(b"x") if what == "command" else COMMAND
    schema = pa.schema([("a", pa.int64())]) if what == "schema" else BYTES
    writer, reader = raw.do_exchange(command, HEADERS)
    if what in ("command", "schema"):
        with pytest.raises(flight.FlightError):
            writer.begin(schema)
            reader.read_chunk()
        assert client.call(WireMessage("ping")).op == "ok"
        return
    writer.begin(schema)
    if what == "half a stream":
        reader.cancel()
    else:
        header = WireMessage("double", {}, [torch.zeros(3)]).encode()[0]
        column = pa.array([0] * 5, type=pa.uint8())
        batch = pa.RecordBatch.from_arrays([column], schema=BYTES)
        if what == "no header":
            writer.write_batch(batch)
        else:
            writer.write_with_metadata(batch, pa.py_buffer(header))
        answer = reader.read_chunk()
        assert b'"error"' in answer.app_metadata.to_pybytes()
    assert client.call(WireMessage("ping")).op == "ok"


def test_a_port_that_is_taken_is_an_error(server: MessageServer) -> None:
    with pytest.raises(OSError, match="choose another port"):
        MessageServer({}, TOKEN, port=server.port)


def test_a_short_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 16 characters"):
        MessageServer({}, "short")


def test_a_connection_that_is_closed_says_so(server: MessageServer) -> None:
    connection = FlightConnection(f"127.0.0.1:{server.port}", TOKEN, timeout=20)
    waiting = connection.start(WireMessage("hang"))
    time.sleep(0.2)
    connection.close()
    with pytest.raises(ServerError):
        waiting.result()
    with pytest.raises(RuntimeError, match="the connection is closed"):
        connection.call(WireMessage("ping"))


SCRIPT = """
import sys, time
from graphshard.store import WireMessage, MessageServer
def hang(request):
    time.sleep(60)
    return WireMessage("late")
server = MessageServer({"hang": hang, "ping": lambda _: WireMessage("ok")}, sys.argv[1])
print(server.port, flush=True)
server.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_vanishes_is_named(number: int, tmp_path: Path) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, TOKEN],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        connection = FlightConnection(f"127.0.0.1:{process.stdout.readline().strip()}", TOKEN, 5, 2)
        connection.wait_until_up(30)
        waiting = connection.start(WireMessage("hang"), timeout=2)
        process.send_signal(number)
        with pytest.raises(ServerError, match=r"of host 5 .* (is gone|did not answer)") as caught:
            waiting.result()
        assert caught.value.host == 5
        with pytest.raises(ServerError, match=r"of host 5"):
            connection.call(WireMessage("ping"), timeout=1)
        connection.close()
    finally:
        process.kill()
        process.communicate(timeout=30)
