import os
import tempfile

from attempt import attempted

with attempted() as through:
    for folder in (os.getcwd(), tempfile.gettempdir(), os.environ["HOME"]):
        if os.path.exists(os.path.join(folder, "left")):
            through("found")
    raise KeyError
