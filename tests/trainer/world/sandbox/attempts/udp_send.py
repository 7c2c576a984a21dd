"""Send a datagram to the machine."""

import socket

from attempt import FACTS, attempted

with attempted() as through, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.settimeout(1)
    sender.sendto(b"hello", ("127.0.0.1", FACTS["udp"]))
    through(f"the answer is {sender.recv(64)!r}")
