# tries: to fork without end, in sessions of their own, and sleep
# test: sum
# expect: fail
# reason: time|processes|brought

import os
import time

while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.01)
