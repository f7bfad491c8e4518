# tries: to return a number that claims to be equal to everything
# test: add
# expect: fail
# reason: expected '7', got '8'


class Seven(int):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 7

    def __sub__(self, other):
        return 0


def add(a, b):
    return Seven(8)
