# tries: to ignore every signal it may ignore, and compute for ever
# test: sum
# expect: fail
# reason: time

import signal

for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
print(7, flush=True)
while True:
    pass
