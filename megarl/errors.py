"""The one exception for a user's mistake, the "did you mean" that helps to mend it, what a terminal may be
given, and the system's refusals."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator
from types import MappingProxyType

EXIT_USER_ERROR = 2
RENAMED = MappingProxyType({"reference": "ground_truth"})  # names that settings had before


# What a terminal obeys, or does not show: control characters but newline and tab, marks that turn the direction of
# writing, separators of lines, invisible characters, halves of characters.
_UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


class UserError(Exception):
    """Something the user can mend: one clear message, no traceback, exit code 2.

    The message names the file, key, row or sample at fault and says what to do.
    silent: another rank tells the user already.
    """

    silent: bool = False


def did_you_mean(word: str, known: Iterable[str], *, most: int = 3) -> str:
    """`" Did you mean 'x' or 'y'?"` for the nearest known words whatever their case, or the empty string.

    >>> did_you_mean("gpso", ["gspo", "grpo", "ppo"])
    " Did you mean 'gspo' or 'grpo' or 'ppo'?"
    """
    plain = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), plain, n=most, cutoff=0.5)
    renamed = RENAMED.get(word.lower())
    near = [renamed] if renamed in plain else [plain[name] for name in close]
    return f" Did you mean {' or '.join(repr(w) for w in near)}?" if near else ""


def printable(text: str) -> str:
    r"""Return a text of data or of a model as a terminal may be given it: what it would obey or hide is spelled out.

    >>> printable("a\x1b[2Jb\u202ec")
    'a\\x1b[2Jb\\u202ec'
    """
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """What the system refuses is raised as OSError. safetensors and tokenizers have exceptions of their own for it."""
    try:
        yield
    except Exception as error:
        refused = re.search(r"\(os error (\d+)\)", str(error))
        if refused is None or isinstance(error, OSError):
            raise
        number = int(refused[1])
        raise OSError(number, os.strerror(number)) from error
