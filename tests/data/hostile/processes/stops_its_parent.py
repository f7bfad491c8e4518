# tries: to stop the process that watches it
# test: sum
# expect: fail
# reason: time on the clock

import os
import signal
import time

for pid in (os.getppid(), 2):
    try:
        os.kill(pid, signal.SIGSTOP)
    except OSError:
        pass
time.sleep(1000)
