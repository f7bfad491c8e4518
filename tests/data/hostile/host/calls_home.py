# tries: to reach a server on this machine and one outside, by TCP and UDP
# test: escape
# expect: pass

import json
import socket

target = json.loads(input())
done = []
for address in (("127.0.0.1", target["port"]), ("10.0.0.1", target["port"]), ("8.8.8.8", 53)):
    try:
        with socket.create_connection(address, timeout=0.2):
            done.append(address)
    except OSError:
        pass
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.sendto(b"hello", address)
            if address[0] != "127.0.0.1":
                done.append(("udp", address))
    except OSError:
        pass
try:
    socket.getaddrinfo("example.com", 80)
    done.append("dns")
except OSError:
    pass
print(f"escaped: {done}" if done else "contained")
