# tries: to fill the memory with children that are each below the limit
# test: sum
# expect: fail
# reason: memory

import os
import time

for _ in range(12):
    if os.fork() == 0:
        data = b"x" * (48 << 20)
        time.sleep(1000)
time.sleep(1000)
