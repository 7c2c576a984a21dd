"""Leave a file for the next program."""

import os
import tempfile

for folder in (os.getcwd(), tempfile.gettempdir(), os.environ["HOME"]):
    with open(os.path.join(folder, "left"), "w") as file:
        file.write("left")
