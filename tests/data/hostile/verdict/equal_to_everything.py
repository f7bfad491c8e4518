# tries: to return an object that is equal to everything
# test: add
# expect: fail
# reason: JSON cannot hold


class Anything:
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return hash(7)

    def __repr__(self):
        return "7"


def add(a, b):
    return Anything()
