# SPDX-License-Identifier: Apache-2.0
"""The exceptions a caller can act on.

::

    Exception
    ├── ValueError, TypeError, IndexError, NotImplementedError   wrong arguments (built in)
    └── GraphShardError
        ├── DGLError               base of what a graph refuses, under the name that scripts catch
        │   ├── GraphValueError         ... and a ValueError
        │   ├── GraphTypeError          ... and a TypeError
        │   └── GraphUnsupportedError   ... and a NotImplementedError
        ├── PartitionFormatError   a partition folder is missing, incomplete or damaged
        ├── MetisError             METIS refused the graph or could not satisfy the request
        ├── RankError              another rank failed, or did not answer in time
        ├── ServerError            a graph server failed, refused, or did not answer in time
        ├── MessageError           what came over the wire, or is to go over it, is no message
        ├── ModelError             a model of the user's own gives what cannot be used
        └── CheckpointError        a checkpoint is damaged or of another run, or in use

Everything else that graphshard raises is a built-in exception whose message holds the rule,
the value that broke it, and the cure.
"""

from __future__ import annotations

from collections.abc import Sequence

NOTICE = "graphshard: "
"""How a line begins that says for whom a wait has lasted half of its time."""


class GraphShardError(Exception):
    """Base of the exceptions that graphshard defines."""


class DGLError(GraphShardError):
    """Base of what a graph refuses; scripts written for DGL catch and raise this name."""


class DGLWarning(UserWarning):
    """What a graph does otherwise than asked, and goes on; scripts written for DGL filter it."""


class GraphValueError(DGLError, ValueError):
    """An argument does not fit the graph: an id, a type, a number of rows."""


class GraphTypeError(DGLError, TypeError):
    """An argument of a graph is of the wrong kind."""


class GraphUnsupportedError(DGLError, NotImplementedError):
    """A call that this kind of graph does not offer; the message names the alternative."""


class PartitionFormatError(GraphShardError, ValueError):
    """A partition folder cannot be used: missing, incomplete, damaged, or of another format."""


class MetisError(GraphShardError, RuntimeError):
    """METIS failed on a graph, or could not meet the balance that was asked for."""


class CheckpointError(GraphShardError, ValueError):
    """A checkpoint is damaged or of another run, or another run is writing to its folder."""


class ModelError(GraphShardError, ValueError):
    """What a model of the user's own gives cannot be used; workers say so in one line."""


class RankError(GraphShardError, RuntimeError):
    """Another rank failed, left, or did not answer within the timeout.

    Args:
        ranks: The ranks held responsible, ascending; empty when they are unknown.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))


class ServerError(GraphShardError, RuntimeError):
    """A graph server failed, left, refused a request, or did not answer within the timeout."""

    def __init__(self, message: str, host: int | None = None) -> None:
        super().__init__(message)
        self.host = host


class MessageError(GraphShardError, ValueError):
    """Bytes from the wire that are no message, or a message that cannot be sent."""
