# tries: to have a child answer after the program has ended
# test: sum
# expect: fail
# reason: expected '7', got ''

import os
import time

if os.fork() == 0:
    time.sleep(0.3)
    print(7, flush=True)
