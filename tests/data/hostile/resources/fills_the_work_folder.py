# tries: to fill the disk with many files
# test: sum
# expect: fail
# reason: No space left|space for files|memory|time

for number in range(10_000):
    with open(f"file{number}", "wb") as file:
        file.write(b"x" * (1 << 20))
