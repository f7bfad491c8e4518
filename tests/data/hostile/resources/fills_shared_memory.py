# tries: to fill /dev/shm
# test: sum
# expect: fail
# reason: No space left|memory|Permission|SIG|brought

for number in range(10_000):
    with open(f"/dev/shm/file{number}", "wb") as file:
        file.write(b"x" * (1 << 20))
