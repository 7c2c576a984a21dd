"""Listen at a TCP port."""

import socket

from attempt import attempted

with attempted() as through:
    server = socket.create_server(("127.0.0.1", 0))
    through(f"listens at {server.getsockname()}")
