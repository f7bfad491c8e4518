# tries: to return a list that claims to be equal to everything
# test: add
# expect: fail
# reason: expected '7'


class Same(list):
    def __eq__(self, other):
        return True

    def __len__(self):
        return 0


def add(a, b):
    return Same([7, 7])
