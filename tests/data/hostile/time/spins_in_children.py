# tries: to divide its computing among children, each below the limit
# test: sum
# expect: fail
# reason: time

import os
import time

children = 0
while True:
    if os.fork() == 0:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        os._exit(0)
    os.wait()
