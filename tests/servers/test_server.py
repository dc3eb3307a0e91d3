# SPDX-License-Identifier: Apache-2.0
"""A server answers, refuses and lives on; a client waits no longer than it said."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import TABLE, TOKEN

from forked_programs import start_program
from graphshard._base.kernels import extension_available
from graphshard.comm.address import joins_one_host
from graphshard.errors import MessageError, ServerError
from graphshard.servers import (
    MessageClient,
    MessageServer,
    TableServer,
    WireMessage,
    _message_stream,
)
from graphshard.servers._message_stream import MessageStream, StreamAcceptor

PROTOCOL = b"graphshard 3\n"


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
def client(server: MessageServer) -> Iterator[MessageClient]:
    connection = MessageClient(f"127.0.0.1:{server.port}", TOKEN, 3, timeout=20)
    yield connection
    connection.close()


def test_it_answers(client: MessageClient) -> None:
    found = client.call(WireMessage("double", {"a": 1}, [torch.arange(5), torch.ones(2, 3)]))
    assert found.op == "doubled"
    assert found.fields == {"a": 1}
    assert found.tensors[0].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("way", ["start", "begin"])
def test_several_requests_travel_at_a_time(client: MessageClient, way: str) -> None:
    send = getattr(client, way)
    waiting = send(WireMessage("hang"))
    found = [send(WireMessage("double", {}, [torch.tensor([i])])) for i in range(20)]
    assert [int(each.result().tensors[0]) for each in found] == list(range(0, 40, 2))
    RELEASED.set()
    assert waiting.result().op == "late"


def test_an_answer_that_is_not_waited_for_is_not_another_s(client: MessageClient) -> None:
    for number in range(8):  # more than there are streams
        client.begin(WireMessage("double", {}, [torch.tensor([100 + number])]))
        found = client.begin(WireMessage("double", {}, [torch.tensor([number])])).result()
        assert int(found.tensors[0]) == 2 * number


def test_threads_begin_requests_side_by_side(client: MessageClient) -> None:
    def ask(number: int) -> int:
        request = WireMessage("double", {}, [torch.tensor([number])])
        return int(client.begin(request).result().tensors[0])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(400))) == list(range(0, 800, 2))


def test_what_a_handler_raises_its_caller_gets(client: MessageClient) -> None:
    with pytest.raises(IndexError, match=r"ids must be below 3 \(got 4\)"):
        client.call(WireMessage("fail", {"how": "index"}))
    with pytest.raises(ServerError, match="of host 3 .* failed: RuntimeError: a fault"):
        client.call(WireMessage("fail", {"how": "other"}))
    with pytest.raises(MessageError, match="unknown request 'other'"):
        client.call(WireMessage("other"))
    assert client.call(WireMessage("ping")).op == "ok"


def test_a_request_that_is_too_long_is_refused(client: MessageClient) -> None:
    with pytest.raises(MessageError, match=r"at most 1048576 bytes \(got 1600000\)"):
        client.call(WireMessage("double", {}, [torch.zeros(200_000, dtype=torch.float64)]))
    assert client.call(WireMessage("ping")).op == "ok"


def test_a_server_that_does_not_answer_is_an_error_in_time(client: MessageClient) -> None:
    start = time.monotonic()
    with pytest.raises(ServerError, match="of host 3 .* did not answer 'hang' within 0.5 s"):
        client.call(WireMessage("hang"), timeout=0.5)
    assert time.monotonic() - start < 15
    assert client.call(WireMessage("ping")).op == "ok"


@pytest.mark.parametrize("token", ["", "another token, as long as the other"])
def test_who_does_not_know_the_token_is_refused(
    server: MessageServer, client: MessageClient, token: str
) -> None:
    other = MessageClient(f"127.0.0.1:{server.port}", token, 3, timeout=20)
    with pytest.raises(ServerError, match="of host 3 .* refused the token"):
        other.call(WireMessage("ping"))
    with pytest.raises(ServerError, match="refused the token"):
        other.wait_until_up(20)
    other.close()
    assert client.call(WireMessage("ping")).op == "ok"


def connected(server: MessageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 20)


def received(raw: socket.socket) -> bytes:
    """All that the server says until it ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(1 << 16):
            found += piece
    return found


@pytest.mark.parametrize(
    "said",
    [
        b"",
        PROTOCOL,
        b"GET / HTTP/1.1\r\n" + b"x" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
        b"graphshard 1\n" + bytes(40),
        os.urandom(1 << 20),
    ],
)
def test_who_speaks_another_protocol_hears_nothing(
    server: MessageServer, client: MessageClient, said: bytes
) -> None:
    with connected(server) as raw:
        with contextlib.suppress(OSError):  # it may have heard enough
            raw.sendall(said)
            raw.shutdown(socket.SHUT_WR)
        assert received(raw) == b""
    assert client.call(WireMessage("ping")).op == "ok"


@pytest.mark.parametrize("proof", [bytes(32), b"", b"x" * 1000])
def test_without_the_token_nothing_is_answered(
    server: MessageServer, client: MessageClient, proof: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Who says the right words, but cannot prove to know the token."""
    header = b'{"op": "ping", "fields": {}, "tensors": []}'
    with connected(server) as raw:
        raw.sendall(PROTOCOL + bytes(8) + bytes(32))
        with contextlib.suppress(OSError):  # it may have heard enough
            raw.sendall(proof + struct.pack("<IQ", len(header), 0) + header)
            raw.shutdown(socket.SHUT_WR)
        found = received(raw)
    assert found[: len(PROTOCOL)] == PROTOCOL
    assert found[len(PROTOCOL) + 40 :] in (b"", bytes(33))
    assert "refused 127.0.0.1" in caplog.text
    assert client.call(WireMessage("ping")).op == "ok"


def test_a_server_without_the_token_is_refused() -> None:
    """The client asks for a proof, too, and sends no request without one."""
    heard: list[bytes] = []

    def pretend() -> None:
        raw, _ = listener.accept()
        raw.recv(1000)
        raw.sendall(PROTOCOL + struct.pack("<Q", 1 << 30) + bytes(32))
        heard.append(raw.recv(1000))
        raw.sendall(b"\1" + bytes(32))
        heard.append(raw.recv(1000))
        raw.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend)
        thread.start()
        client = MessageClient(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, 3, timeout=20)
        with pytest.raises(ServerError, match="of host 3 .* refused the token"):
            client.call(WireMessage("ping"))
        thread.join(20)
        client.close()
    assert len(heard[0]) == 32
    assert TOKEN.encode() not in heard[0]
    assert heard[1] == b""


@pytest.fixture
def between_hosts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Streams are as between hosts; bytes of all that is sent."""
    sizes: list[int] = []
    send_some = _message_stream.send_some

    def counted(raw: socket.socket, pieces: Any) -> int:
        sizes.append(send_some(raw, pieces))
        return sizes[-1]

    monkeypatch.setattr(_message_stream, "joins_one_host", lambda _: False)
    monkeypatch.setattr(_message_stream, "send_some", counted)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_between_hosts_long_rows_travel_without_zeros(
    between_hosts: list[int], dtype: torch.dtype
) -> None:
    server = TableServer(0, TOKEN)
    server.start()
    client = MessageClient(server.address, TOKEN, timeout=20)
    client.call(WireMessage("create", TABLE | {"dtype": str(dtype)[6:], "row_shape": [2000]}))
    rows = torch.zeros(100, 2000, dtype=dtype)
    rows[::3, ::50] = 7
    for name, tensors in (
        ("write", [torch.arange(100), rows]),
        ("read", [torch.arange(99, -1, -1)]),
    ):
        fields = {"name": TABLE["name"]} if name == "write" else {"names": [[TABLE["name"]]]}
        between_hosts.clear()
        answer = client.call(WireMessage(name, fields, tensors))
        assert rows.nbytes > 4 * sum(between_hosts) or not extension_available()
    assert torch.equal(answer.tensors[0], rows.flip(0))
    client.close()
    server.stop()


def test_on_one_host_zeros_travel(client: MessageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_message_stream, "without_zeros", None)
    rows = torch.zeros(50_000)
    assert torch.equal(client.call(WireMessage("double", {}, [rows])).tensors[0], rows)


def test_what_joins_one_host() -> None:
    own = ("127.0.0.2", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname()[:2], 20, own)
        accepted, _ = listener.accept()
        assert joins_one_host(raw)
        assert joins_one_host(accepted)
        for each in (raw, accepted):
            each.close()
            assert joins_one_host(each), "nothing is sent any more"
    one, other = socket.socketpair()
    assert joins_one_host(one)
    one.close()
    other.close()

    class Between(socket.socket):
        def getsockname(self) -> tuple[str, int]:
            return ("10.0.0.1", 80)

        def getpeername(self) -> tuple[str, int]:
            return (self.other, 80)

        other = "10.0.0.2"

    with Between() as raw:
        assert not joins_one_host(raw)
        raw.other = "10.0.0.1"
        assert joins_one_host(raw)


HEADER = b'{"op": "double", "fields": {}, "tensors": [["float32", [3]]]}'
SHORTER = b'{"op": "double", "fields": {}, "tensors": [["float32", [3], 9]]}'
HUGE = b'{"op": "double", "fields": {}, "tensors": [["float32", [300000], 37504]]}'


@pytest.mark.parametrize(
    ("sizes", "rest", "refusal"),
    [
        ((len(HEADER), 5), HEADER + bytes(5), "take 12 bytes"),
        ((len(HEADER), 2000), HEADER + bytes(2000), "take 12 bytes"),
        ((len(SHORTER), 12), SHORTER + bytes(12), "take 9 bytes"),
        ((len(SHORTER), 9), SHORTER + b"abc" + bytes(6), "came as 9 that are not its words"),
        ((len(HUGE), 37504), HUGE + bytes(37504), "at most 1048576 bytes"),
        ((3, 0), b"abc", "must be JSON"),
        ((0, 0), b"", "must be JSON"),
        ((1 << 31, 0), b"", "at most 16777216 bytes"),
        ((10, 1 << 63), b"", "at most 1048576 bytes"),
        ((len(HEADER), 12), HEADER + bytes(5), None),  # cut
        ((len(HEADER), 12), HEADER[:9], None),
    ],
)
def test_what_is_no_message_is_refused(
    server: MessageServer,
    client: MessageClient,
    sizes: tuple[int, int],
    rest: bytes,
    refusal: str | None,
) -> None:
    raw = connected(server)
    stream = MessageStream(raw, 1 << 20)
    stream.prove(TOKEN, "0123456789abcdef", time.monotonic() + 20)
    raw.sendall(struct.pack("<IQ", *sizes) + rest)
    if refusal is None:
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            stream.receive()
    else:
        answer = stream.receive()
        assert answer.op == "error"
        assert refusal in answer.fields["text"]
        if sizes[1] < 1 << 20 and sizes[0] < 1 << 20:  # the next message is found
            stream.send(WireMessage("double", {}, [torch.ones(2)]))
            assert stream.receive().tensors[0].tolist() == [2.0, 2.0]
        else:
            with pytest.raises(ConnectionError):
                stream.receive()
    stream.close()
    assert client.call(WireMessage("ping")).op == "ok"


def test_who_says_nothing_does_not_keep_clients_out(
    server: MessageServer, client: MessageClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.call(WireMessage("ping")).op == "ok"
    silent = [connected(server) for _ in range(200)]
    assert client.call(WireMessage("ping")).op == "ok"
    other = MessageClient(f"127.0.0.1:{server.port}", TOKEN, 3, timeout=20)
    assert other.call(WireMessage("ping")).op == "ok"
    other.close()
    for raw in silent:
        raw.close()
    assert "have yet to prove who they are" in caplog.text


def dribble(server: MessageServer, num_strangers: int, stop: threading.Event) -> None:
    """Begin as a client does, byte by byte, on many connections; open those anew that are ended."""
    said = PROTOCOL + bytes(40)
    strangers: list[list[Any]] = [[connected(server), 0] for _ in range(num_strangers)]
    while not stop.wait(0.1):
        for stranger in strangers:
            raw, sent = stranger
            try:
                raw.send(said[sent : sent + 1])
                stranger[1] += 1
            except OSError:
                raw.close()
                stranger[:] = connected(server), 0
    for raw, _ in strangers:
        raw.close()


def test_who_speaks_slowly_does_not_keep_clients_out(
    server: MessageServer, caplog: pytest.LogCaptureFixture
) -> None:
    """More of them than are waited for, all from the address that the clients have."""
    stop = threading.Event()
    thread = threading.Thread(target=dribble, args=(server, 160, stop))
    thread.start()
    try:
        for _ in range(10):
            time.sleep(0.1)
            late = MessageClient(f"127.0.0.1:{server.port}", TOKEN, 3, timeout=20)
            assert late.call(WireMessage("ping")).op == "ok"
            late.close()
    finally:
        stop.set()
        thread.join(20)
    refused = [r for r in caplog.records if r.message.startswith("refused 127.0.0.1")]
    assert 0 < len(refused) <= 20, "a stranger must not fill the log"


def test_a_flood_ends_those_of_its_own_address_alone(server: MessageServer) -> None:
    """A client that takes its time (here: between its two words) stays, if it is from elsewhere."""
    other = socket.create_connection(("127.0.0.1", server.port), 20, ("127.0.0.2", 0))
    flood = [connected(server) for _ in range(200)]
    stream = MessageStream(other, 1 << 20)
    stream.prove(TOKEN, "0123456789abcdef", time.monotonic() + 20)
    stream.send(WireMessage("ping"))
    assert stream.receive().op == "ok"
    stream.close()
    for raw in flood:
        raw.close()


def slow_bytes(raw: socket.socket, data: bytes, seconds: float) -> int:
    """How many bytes go, one after another, until the other end has had enough."""
    for number in range(len(data)):
        try:
            raw.sendall(data[number : number + 1])
            raw.settimeout(seconds)
            if raw.recv(1000) == b"":
                return number
        except TimeoutError:
            continue
        except OSError:
            return number
    return len(data)


def test_a_server_waits_for_a_beginning_as_a_whole() -> None:
    taken: list[object] = []
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = StreamAcceptor(
        listener, TOKEN, 1 << 20, lambda *stream: taken.append(stream), proof_seconds=0.6
    )
    with socket.create_connection(listener.getsockname(), 20) as raw:
        assert slow_bytes(raw, PROTOCOL + bytes(40), 0.2) < 40
    acceptor.stop()
    assert taken == []


@pytest.mark.parametrize("way", ["start", "begin"])
def test_a_client_waits_for_a_beginning_as_a_whole(way: str) -> None:
    """The server sends a byte of its greeting now and then, each within the client's timeout."""
    sent: list[int] = []

    def pretend() -> None:
        raw, _ = listener.accept()
        with raw:
            raw.recv(1000)
            greeting = PROTOCOL + struct.pack("<Q", 1 << 30) + bytes(32)
            sent.append(slow_bytes(raw, greeting, 0.2))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend)
        thread.start()
        client = MessageClient(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, 3, timeout=0.6)
        with pytest.raises(ServerError, match=r"did not answer 'ping' within 0.6 s"):
            getattr(client, way)(WireMessage("ping")).result()
        thread.join(30)
        client.close()
    assert sent[0] < 40


def test_tls(tmp_path: Path) -> None:
    """Who checks the certificate is answered; who does not, or checks another one, is refused."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    for name in ("own", "other"):
        words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        words += ["-nodes", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.pem"]
        subprocess.run(["openssl", *words, *files], check=True, capture_output=True, timeout=60)
    pair = (tmp_path / "own.pem", tmp_path / "own.key")
    handlers = {"double": double, "ping": lambda _: WireMessage("ok")}
    server = MessageServer(handlers, TOKEN, certificate=pair)
    address = f"127.0.0.1:{server.port}"
    for certificates, refusal in (
        (None, "is gone"),
        (tmp_path / "other.pem", "CERTIFICATE_VERIFY"),
    ):
        client = MessageClient(address, TOKEN, 3, timeout=20, certificates=certificates)
        with pytest.raises(ServerError, match=refusal):
            client.call(WireMessage("ping"))
        client.close()
    client = MessageClient(address, TOKEN, 3, timeout=20, certificates=pair[0])
    sent = torch.randn(300_000)  # more than a record of TLS takes
    found = client.call(WireMessage("double", {}, [sent, torch.arange(3)]))
    assert torch.equal(found.tensors[0], 2 * sent)
    assert found.tensors[1].tolist() == [0, 2, 4]
    client.close()
    server.stop()


def test_a_port_that_is_taken_is_an_error(server: MessageServer) -> None:
    with pytest.raises(OSError, match="choose another port"):
        MessageServer({}, TOKEN, port=server.port)


def test_a_short_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 16 characters"):
        MessageServer({}, "short")


@pytest.mark.parametrize("way", ["start", "begin"])
def test_a_connection_that_is_closed_says_so(server: MessageServer, way: str) -> None:
    connection = MessageClient(f"127.0.0.1:{server.port}", TOKEN, timeout=20)
    waiting = getattr(connection, way)(WireMessage("hang"))
    time.sleep(0.2)
    connection.close()
    with pytest.raises(ServerError):
        waiting.result()
    with pytest.raises(RuntimeError, match="the connection is closed"):
        connection.call(WireMessage("ping"))


SCRIPT = """
import sys, time
from graphshard.servers import WireMessage, MessageServer
def hang(request):
    time.sleep(60)
    return WireMessage("late")
server = MessageServer({"hang": hang, "ping": lambda _: WireMessage("ok")}, sys.argv[1])
print(server.port, flush=True)
server.wait()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)]
)
def test_a_server_that_vanishes_is_named(number: int) -> None:
    process = start_program(SCRIPT, TOKEN)
    try:
        connection = MessageClient(f"127.0.0.1:{process.stdout.readline().strip()}", TOKEN, 5, 2)
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
