"""Makes the environment of TRL with vLLM, which `step-trl` needs and the check never makes: 10 minutes, 12 GB."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.environments import DEFAULT_CACHE, peer_python
from benchmarks.gpu.parts import PEER

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where environments are kept")
    print(peer_python(PEER, parser.parse_args().cache))
