"""Files that are whole or absent."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import UserError, system_errors


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that a reader, or a run resumed after a crash, finds whole or not at all.

    The content goes to a temporary file beside `path`, to the disk, and then to its name.
    Raises UserError naming the path if it cannot be written (no such folder, no permission, disk full).
    """
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the code of others that writes `path`: raises UserError as `write_atomic` does."""
    try:
        with system_errors():
            yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the message for a file that the system refuses to write."""
    return UserError(
        f"{path}: cannot be written ({error.strerror or error}). "
        "Free some space or choose another run folder, then resume; what was written before is whole."
    )
