# tries: to write without end to standard output
# test: sum
# expect: fail
# reason: too much output

print(7)
while True:
    print("x" * 4096)
