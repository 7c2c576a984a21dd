"""Start threads without end."""

import threading
import time

try:
    for _ in range(10000):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
except RuntimeError as error:
    print("refused:", error)
else:
    print("through: 10,000 threads")
