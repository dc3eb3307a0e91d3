# SPDX-License-Identifier: Apache-2.0
"""Requests that are wrong in every way: a graph server refuses each, changes nothing, and lives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphshard.data import random_graph
from graphshard.errors import MessageError
from graphshard.partition import partition_graph
from graphshard.servers import GraphServer, MessageClient, WireMessage

TOKEN = "a token that is for tests alone"
NUM_NODES = 60
POLICY = "node~_N"
ETYPE = ["_N", "_E", "_N"]
OPTIONS = {
    "replace": False,
    "weights": None,
    "edge_dir": "in",
    "labor": False,
    "with_eids": True,
    "weights_are_mask": False,
}
OURS = {
    "name": f"{POLICY}~ours",
    "dtype": "float32",
    "row_shape": [2],
    "starts": [0, NUM_NODES],
    "policy": POLICY,
    "persistent": True,
}
IDS = torch.tensor([3, 0, 59])
#: Requests that are answered, which the others are made from.
GOOD = [
    WireMessage("ping"),
    WireMessage("graph", {"name": "g"}),
    WireMessage("tables", {"names": [OURS["name"]]}),
    WireMessage("create", OURS),
    WireMessage("release", {"name": OURS["name"]}),
    WireMessage("delete", {"name": f"{POLICY}~none"}),
    WireMessage("read", {"names": [[f"{POLICY}~feat", OURS["name"]]]}, [IDS]),
    WireMessage("write", {"name": OURS["name"]}, [IDS, torch.ones(3, 2)]),
    WireMessage("count_nonzero", {"name": OURS["name"]}),
    WireMessage("ends", {"etype": ETYPE}, [IDS]),
    WireMessage(
        "draw",
        {"requests": [[ETYPE, 4, 7, None]], "options": OPTIONS},
        [IDS, torch.empty(0, dtype=torch.int64)],
    ),
    WireMessage("here", {"label": "trainer"}),
    WireMessage("mark_written", {"name": OURS["name"]}),
    WireMessage("restored"),
    WireMessage("loaded", {"digest": "a" * 64, "step": 3}),
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    -(2**70),
    1.5,
    1e308,
    "",
    "../../etc/passwd",
    "node~_N~feat\x00",
    "x" * 10_000,
    "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    [],
    [[]],
    {},
    {"name": "node~_N~feat"},
    ["node~_N~feat"] * 300,
    [[["_N", "_E", "_N"], 4, 7, None]] * 20,
    "float32",
    "object",
]
TENSORS: list[Tensor] = [
    torch.empty(0),
    torch.empty(0, dtype=torch.int64),
    torch.tensor([-1]),
    torch.tensor([NUM_NODES]),
    torch.tensor([2**62, 1]),
    torch.tensor([0, 1], dtype=torch.int32),
    torch.tensor([1], dtype=torch.uint8),
    torch.tensor(3),
    torch.zeros(2, 2, dtype=torch.int64),
    torch.full((3, 2), float("nan")),
    torch.zeros(3, 2, dtype=torch.float64),
    torch.zeros(3, 2, 0),
    torch.zeros(1000, dtype=torch.bool),
]


REFUSED = (MessageError, ValueError, TypeError, IndexError, KeyError, NotImplementedError, OSError)


LONG = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GraphServer]:
    graph = random_graph(num_nodes=NUM_NODES, num_edges=400, seed=0)
    graph.ndata["feat"] = torch.randn(NUM_NODES, 3)
    partition_graph(graph, "g", 2, tmp_path, quiet=True)
    made = GraphServer(0, 1, tmp_path / "g.json", TOKEN, max_message=1 << 16)
    yield made
    made.stop()


def changed(chosen: random.Random, value: Any) -> Any:
    """A value with something in it replaced, removed or added."""
    how = chosen.random()
    if isinstance(value, dict) and value and how < 0.8:
        key = chosen.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        if how < 0.1:
            return rest
        if how < 0.2:
            return value | {"more": chosen.choice(VALUES)}
        return rest | {key: changed(chosen, value[key])}
    if isinstance(value, list) and value and how < 0.7:
        place = chosen.randrange(len(value))
        middle = [] if how < 0.1 else [changed(chosen, value[place])]
        return value[:place] + middle + value[place + (how > 0.05) :]
    return chosen.choice(VALUES)


def hostile(chosen: random.Random) -> WireMessage:
    good = chosen.choice(GOOD)
    op, fields, tensors = good.op, dict(good.fields), list(good.tensors)
    for _ in range(chosen.choice([1, 1, 2, 5])):
        what = chosen.random()
        if what < 0.6:
            found = changed(chosen, fields)
            fields = found if isinstance(found, dict) else fields
        elif what < 0.9 and tensors:
            place = chosen.randrange(len(tensors))
            tensors[place] = chosen.choice(TENSORS)
        elif what < 0.95:
            tensors = tensors[:-1] if chosen.random() < 0.5 else [*tensors, chosen.choice(TENSORS)]
        else:
            op = chosen.choice(["", "draw", "read", "write", "delete", "_on_read", "x" * 10_000])
    return WireMessage(op, fields, tensors)


def contents(connection: MessageClient) -> dict[str, tuple[str, Tensor]]:
    """Every table of the server: what it is, and its rows."""
    found = {}
    for table in connection.call(WireMessage("tables")).fields["tables"]:
        rows = torch.arange(table["starts"][-1])
        request = WireMessage("read", {"names": [[table["name"]]]}, [rows])
        (read,) = connection.call(request).tensors
        found[table["name"]] = str(table), read.clone().view(torch.uint8)
    return found


@pytest.mark.parametrize("rounds", [600, pytest.param(100_000, marks=LONG)])
def test_what_is_refused_changes_nothing(
    server: GraphServer, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = MessageClient(server.address, TOKEN, timeout=30)
    for request in (GOOD[3], *GOOD, GOOD[3]):
        connection.call(request)
    chosen, refused, before = random.Random(rounds), 0, contents(connection)
    for number in range(rounds):
        request = hostile(chosen)
        try:
            connection.call(request)
        except REFUSED as error:
            refused += 1
            assert str(error)
            if request.op in ("create", "write", "delete", "release") or number % 100 == 0:
                after = contents(connection)
                assert after.keys() == before.keys(), request
                for name, (info, rows) in before.items():
                    assert (after[name][0], bool(after[name][1].equal(rows))) == (info, True), name
        else:
            if request.op in ("create", "write", "delete", "release"):
                connection.call(GOOD[3])
                before = contents(connection)
        caplog.clear()
    assert refused > rounds // 2
    assert connection.call(WireMessage("graph", {"name": "g"})).fields["num_parts"] == 2
    connection.close()


class Gathered(AssertionError):
    """Rows were gathered for an answer that cannot be sent."""


def gather(*arguments: Any, **keywords: Any) -> None:
    raise Gathered


MANY = torch.zeros(7000, dtype=torch.int32)
NONE = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize(
    "request_",
    [
        WireMessage("read", {"names": [[f"{POLICY}~feat"] * 2]}, [MANY]),
        WireMessage("ends", {"etype": ETYPE}, [MANY]),
        WireMessage("draw", {"requests": [[ETYPE, -1, 7, None]], "options": OPTIONS}, [MANY, NONE]),
        WireMessage(
            "draw",
            {"requests": [[ETYPE, 2**30, 7, None]], "options": OPTIONS | {"replace": True}},
            [IDS, NONE],
        ),
    ],
    ids=["read", "ends", "draw all", "draw again and again"],
)
def test_a_request_whose_answer_is_too_large_is_refused_before_it_is_made(
    server: GraphServer, request_: WireMessage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (
        "graphshard.servers._host_tables.copy_rows",
        "graphshard.servers._host_graph.HostGraph.draw",
        "graphshard.servers._host_graph.HostGraph.ends_of",
    ):
        monkeypatch.setattr(place, gather)
    connection = MessageClient(server.address, TOKEN, timeout=30)
    with pytest.raises(MessageError, match=r"has at most 65536 bytes \(it would have \d+\); ask"):
        connection.call(request_)
    connection.close()
