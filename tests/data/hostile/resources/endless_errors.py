# tries: to write without end to standard error
# test: sum
# expect: fail
# reason: time

import sys

print(7, flush=True)
while True:
    sys.stderr.write("x" * 4096)
