# tries: to fill memory that is shared and so not counted as data
# test: sum
# expect: fail
# reason: memory|SIG|MemoryError|Cannot allocate|brought|time

import mmap
import time

maps = []
for _ in range(64):
    maps.append(mmap.mmap(-1, 16 << 20))
    maps[-1].write(b"x" * (16 << 20))
time.sleep(1000)
