# tries: to fill the memory
# test: sum
# expect: fail
# reason: MemoryError|memory

data = bytes(1 << 20)
while True:
    data = data + data
