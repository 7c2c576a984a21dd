"""Connect to a server's Unix socket by its path."""

import socket

from attempt import FACTS, attempted

with attempted() as through, socket.socket(socket.AF_UNIX) as client:
    client.connect(FACTS["unix"])
    through(f"it said {client.recv(64)!r}")
