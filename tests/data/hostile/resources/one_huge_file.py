# tries: to write a file without end
# test: sum
# expect: fail
# reason: File too large|SIGXFSZ|No space left|space for files|time

with open("huge", "wb") as file:
    while True:
        file.write(b"x" * (1 << 20))
