"""Sleep for long."""

import time

time.sleep(1000)
print("through: slept")
