# tries: to wait for input that never comes
# test: sum
# expect: fail
# reason: time on the clock

import os
import sys

sys.stdin.read()
read, write = os.pipe()
os.read(read, 1)
