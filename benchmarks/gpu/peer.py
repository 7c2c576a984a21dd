"""Makes the environment of TRL with vLLM, which `step-trl` needs and the check never makes: 10 minutes, 12 GB.

Where there is no package index, from wheels that were carried there (wheels.py): with PIP_NO_INDEX=1 and
PIP_FIND_LINKS.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.environments import DEFAULT_CACHE, peer_python
from benchmarks.gpu.parts import PEER

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where environments are kept")
    print(peer_python(PEER, parser.parse_args().cache))
