"""Connect to a server's abstract Unix socket."""

import socket

from attempt import FACTS, attempted

with attempted() as through, socket.socket(socket.AF_UNIX) as client:
    client.connect("\0" + FACTS["abstract"])
    through(f"it said {client.recv(64)!r}")
