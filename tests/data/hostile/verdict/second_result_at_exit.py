# tries: to add a better result after the one it returned
# test: add
# expect: fail
# reason: expected '7'

import atexit
import os


def add(a, b):
    atexit.register(os.write, 3, b"7")
    return 8
