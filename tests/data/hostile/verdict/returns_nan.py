# tries: to return NaN, unequal to itself, and booleans of odd sorts
# test: add
# expect: fail
# reason: expected '7', got 'NaN'


def add(a, b):
    return float("nan")
