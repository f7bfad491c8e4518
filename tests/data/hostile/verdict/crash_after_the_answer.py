# tries: to answer and then fail
# test: sum
# expect: fail
# reason: exit code 1: RuntimeError: I am done

print(sum(map(int, input().split())))
raise RuntimeError("I am done")
