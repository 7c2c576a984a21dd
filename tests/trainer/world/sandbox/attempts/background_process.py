"""Leave a process behind: two forks, a session of its own, deaf to signals."""

import os
import signal
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while True:
            with open("alive", "w") as file:
                file.write("alive")
            time.sleep(0.001)
    os._exit(0)
os.wait()
while not os.path.exists("alive"):
    time.sleep(0.001)
