# SPDX-License-Identifier: Apache-2.0
"""How servers and trainers talk: messages, a server that answers them, a connection to one."""

from ._connection import Connection, PendingAnswer
from ._message import Message, Spec, check_dtype, dtype_name, dtype_named
from ._server import Handler, MessageServer
