"""Change the interpreter that the next program gets."""

import builtins
import json
import os
import sys

builtins.print = lambda *arguments, **named: None
json.loads = lambda text: {}
sys.modules["math"] = os
os.environ["LEFT"] = "left"
sys.path.insert(0, "/left")
