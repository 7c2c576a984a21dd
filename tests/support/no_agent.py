"""Stands where Ray's raylet expects the agent of its dashboard, in tests that look at no dashboard.

The agent takes two seconds of CPU time, a quarter of a tiny run. Without Ray's optional packages it offers nothing and
says so by the port -1. That is all that this does: `no_agent.py SESSION-FOLDER NODE-ID`, which lasts as long as the
raylet.
"""

import ctypes
import os
import signal
import sys

SERVICES = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    folder, node = sys.argv[1:]
    for service in SERVICES:
        path = os.path.join(folder, f"{service}_{node}")
        with open(f"{path}.new", "w") as file:
            file.write("-1")
        os.rename(f"{path}.new", path)
    signal.pause()


if __name__ == "__main__":
    main()
