"""Find what an earlier program was given in the worker's memory."""

import sys

print(len(sys.stdin.read()))
