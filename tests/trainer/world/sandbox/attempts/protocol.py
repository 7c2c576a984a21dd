"""Write what the worker would say to the driver: frames, pickles."""

import os
import pickle

from attempt import attempted

with attempted() as through:
    written = 0
    for descriptor in (0, *range(3, 64)):
        try:
            written += os.write(descriptor, b"e\0\0\0\0" + pickle.dumps(print))
        except OSError:
            continue
        if descriptor == 0:
            # Its own standard input, a file of its own.
            written = 0
    if not written:
        raise KeyError
    through("somebody reads it")
