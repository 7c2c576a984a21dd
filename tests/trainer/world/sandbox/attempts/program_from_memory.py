"""Execute a program from memory."""

import os

from attempt import attempted

with attempted() as through:
    descriptor = os.memfd_create("program")
    os.write(descriptor, b"#!/bin/true")
    through("made")
