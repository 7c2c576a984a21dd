"""Become root by a program with the bit for it."""

import subprocess

from attempt import attempted

with attempted() as through:
    said = subprocess.run(["/usr/bin/su", "-c", "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    if said.returncode:
        raise PermissionError(1, said.stderr)
    through("did")
