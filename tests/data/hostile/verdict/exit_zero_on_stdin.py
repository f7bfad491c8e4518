# tries: to end with code 0 without an answer
# test: sum
# expect: fail
# reason: expected '7'

raise SystemExit(0)
