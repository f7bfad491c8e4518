# tries: to offer a server that others on this machine can reach
# test: escape
# expect: pass

import json
import socket

json.loads(input())
done = []
for family in (socket.AF_INET, socket.AF_INET6):
    try:
        with socket.socket(family) as server:
            server.bind(("", 0))
            server.listen()
            done.append(server.getsockname())
    except OSError:
        pass
print(f"escaped: {done}" if done else "contained")
