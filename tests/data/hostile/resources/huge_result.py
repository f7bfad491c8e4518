# tries: to return a value too large to read
# test: add
# expect: fail
# reason: too much output


def add(a, b):
    return "x" * (1 << 24)
