# tries: to make a file that claims to be enormous
# test: sum
# expect: fail
# reason: File too large|SIGXFSZ

with open("sparse", "wb") as file:
    file.truncate(1 << 50)
print(8)
