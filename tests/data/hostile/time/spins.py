# tries: to compute for ever
# test: sum
# expect: fail
# reason: time

print(7, flush=True)
while True:
    pass
