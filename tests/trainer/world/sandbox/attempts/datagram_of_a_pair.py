"""Send from one of a pair of sockets to another's path."""

import socket

from attempt import FACTS, attempted

with attempted() as through:
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.sendto(b"hello", FACTS["unix"] + ".datagrams")
    through("it was sent")
