# tries: to break the reader of results with a deeply nested value
# test: add
# expect: fail
# reason: no JSON

import os


def add(a, b):
    os.write(3, b"[" * 60_000)
    os._exit(0)
