# tries: to compute a number with ten thousand million digits
# test: sum
# expect: fail
# reason: time|[Mm]emory

print(10**10**10)
