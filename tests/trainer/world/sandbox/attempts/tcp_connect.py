"""Connect to a TCP server of the machine."""

import socket

from attempt import FACTS, attempted

with attempted() as through, socket.create_connection(("127.0.0.1", FACTS["tcp"]), 1) as connection:
    through(f"it said {connection.recv(64)!r}")
