"""Find the job's secrets in the environment."""

import os

from attempt import attempted

with attempted() as through:
    if "SECRET" not in os.environ:
        raise KeyError
    through(os.environ["SECRET"])
