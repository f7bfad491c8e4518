# tries: to confuse the comparison with bytes that are no text
# test: sum
# expect: fail
# reason: expected '7'

import sys

sys.stdout.buffer.write(b"\x00\xff\xfe7\n\xed\xa0\x80\x1b[2J\r\n")
