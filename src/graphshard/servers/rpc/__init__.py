# SPDX-License-Identifier: Apache-2.0
"""How servers and trainers talk: messages, a server that answers them, a client of one."""

from ._acceptor import PROOF_SECONDS, StreamAcceptor
from ._client import MessageClient, PendingAnswer, connect_by
from ._message import Spec, WireMessage, bytes_of, check_dtype, check_shape, dtype_name, dtype_named
from ._server import Handler, MessageServer
from ._stream import MessageStream, TokenError, prepare, send_some, take_away
