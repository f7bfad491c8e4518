# tries: to overflow the interpreter's stack
# test: sum
# expect: fail
# reason: SIGSEGV|RecursionError|MemoryError|memory|time

import sys

sys.setrecursionlimit(1 << 30)


class Turtle:
    def __repr__(self):
        return repr(self) + "."


print(repr(Turtle()))
