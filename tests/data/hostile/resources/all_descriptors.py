# tries: to open files until none is left
# test: sum
# expect: fail
# reason: Too many open files

import os

while True:
    os.open("/dev/null", os.O_RDONLY)
