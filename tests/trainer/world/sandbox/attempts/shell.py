"""Start a program of the machine."""

import subprocess

from attempt import attempted

with attempted() as through:
    through(subprocess.run(["/usr/bin/id"], capture_output=True, text=True, check=True).stdout.strip())
