# SPDX-License-Identifier: Apache-2.0
"""trace: nesting, threads. No process group."""

from __future__ import annotations

import threading

from graphshard.comm import trace
from graphshard.comm.group import count


def test_traces_nest():
    count("send", 1)
    with trace() as outer:
        count("send", 10)
        with trace() as inner:
            count("send", 100)
            count("all_to_all", 7)
        count("barrier", 0)
    count("send", 1000)
    assert inner.calls == {"send": 1, "all_to_all": 1}
    assert inner.bytes_sent == {"send": 100, "all_to_all": 7}
    assert outer.calls == {"send": 2, "all_to_all": 1, "barrier": 1}
    assert (outer.total_calls, outer.total_bytes) == (4, 117)
    assert repr(inner) == (
        "Trace(calls={'send': 1, 'all_to_all': 1}, bytes_sent={'send': 100, 'all_to_all': 7})"
    )


def test_an_error_closes_the_trace():
    try:
        with trace() as counted:
            raise KeyError
    except KeyError:
        count("send", 5)
    assert counted.total_calls == 0


def test_all_threads_are_counted():
    def work():
        for _ in range(1000):
            count("send", 3)

    with trace() as counted:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counted.calls == {"send": 4000}
    assert counted.total_bytes == 12000


def test_one_thread_can_be_counted_alone():
    with trace(only_this_thread=True) as mine, trace() as everything:
        thread = threading.Thread(target=count, args=("send", 5))
        thread.start()
        thread.join()
        count("send", 7)
    assert mine.bytes_sent == {"send": 7}
    assert everything.bytes_sent == {"send": 12}
