# tries: to reach the host by local, abstract, virtual-machine, raw and kernel sockets
# test: escape
# expect: pass

import json
import socket

target = json.loads(input())
done = []
for address in (target["unix"], "\0" + target["abstract"], "/var/run/docker.sock", "/run/systemd/private"):
    try:
        with socket.socket(socket.AF_UNIX) as local:
            local.connect(address)
            done.append(address)
    except OSError:
        pass
for family, kind in (
    (socket.AF_VSOCK, socket.SOCK_STREAM),
    (socket.AF_PACKET, socket.SOCK_RAW),
    (socket.AF_NETLINK, socket.SOCK_RAW),
    (socket.AF_INET, socket.SOCK_RAW),
    (socket.AF_ALG, socket.SOCK_SEQPACKET),
):
    try:
        socket.socket(family, kind).close()
        done.append(family)
    except OSError:
        pass
print(f"escaped: {done}" if done else "contained")
