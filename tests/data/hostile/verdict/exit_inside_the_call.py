# tries: to end with code 0 inside the tested function
# test: add
# expect: fail
# reason: ended before the function returned

import os


def add(a, b):
    os._exit(0)
