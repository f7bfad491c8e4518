# tries: to stall the reader of results with an enormous number
# test: add
# expect: fail
# reason: no JSON

import os


def add(a, b):
    os.write(3, b"9" * 60_000)
    os._exit(0)
