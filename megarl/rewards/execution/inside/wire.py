"""The two directions of a sandbox's pipe. Frames: four bytes of length, then the body.

Requests go in, marshalled, because we trust what comes from outside and marshal needs no import. Reports come out
as a fixed header and three blobs, because nothing that was near a hostile program may be parsed by a clever format.
"""

from __future__ import annotations

import marshal
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LENGTH = struct.Struct("!I")
HEADER = struct.Struct("!BiddQIIi")  # kind, code, wall and cpu seconds, bytes of memory, lengths of the blobs
READY, FAILURE, EXIT, SIGNAL, WALL, OUTPUT, SPOILED = range(7)
MARSHAL_VERSION = 2  # understood by every Python 3


def pack_request(content: dict[str, Any]) -> bytes:
    """Return the frame of a request. content: plain containers, text, bytes and numbers."""
    body = marshal.dumps(content, MARSHAL_VERSION)
    return LENGTH.pack(len(body)) + body


def pack_report(
    kind: int,
    code: int = 0,
    wall_seconds: float = 0.0,
    cpu_seconds: float = 0.0,
    memory_bytes: int = 0,
    stdout: bytes = b"",
    stderr: bytes = b"",
    result: bytes | None = None,
) -> bytes:
    lengths = len(stdout), len(stderr), -1 if result is None else len(result)
    body = HEADER.pack(kind, code, wall_seconds, cpu_seconds, memory_bytes, *lengths)
    body += stdout + stderr + (result or b"")
    return LENGTH.pack(len(body)) + body


def unpack_report(body: bytes) -> tuple[int, int, float, float, int, bytes, bytes, bytes | None]:
    """Return what `pack_report` was given. Raises ValueError for anything else."""
    if len(body) < HEADER.size:
        raise ValueError("a report is too short")
    kind, code, wall, cpu, memory, out, err, result = HEADER.unpack_from(body)
    rest = body[HEADER.size :]
    if result < -1 or len(rest) != out + err + max(0, result) or not (0 <= wall < 1e9 and 0 <= cpu < 1e9):
        raise ValueError("a report does not add up")
    stdout, stderr, value = rest[:out], rest[out : out + err], rest[out + err :]
    return kind, code, wall, cpu, memory, stdout, stderr, value if result >= 0 else None


def receive(channel: int) -> dict[str, Any] | None:
    """Return the next request; None at the end of the input."""
    header = _read(channel, LENGTH.size)
    body = header and _read(channel, LENGTH.unpack(header)[0])
    return marshal.loads(body) if body else None


def send(channel: int, frame: bytes) -> None:
    data = memoryview(frame)
    while data:
        data = data[os.write(channel, data) :]


def _read(channel: int, length: int) -> bytes | None:
    parts = []
    while length:
        part = os.read(channel, min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
