"""Read a pod's service account."""

import os

from attempt import FACTS, attempted

with attempted() as through, open(os.path.join(FACTS["account"], "token")) as file:
    through(file.read())
