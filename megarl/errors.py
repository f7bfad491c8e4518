"""The one exception for a user's mistake, and the "did you mean" that helps to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_USER_ERROR = 2


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
    near = [plain[name] for name in difflib.get_close_matches(word.lower(), plain, n=most, cutoff=0.5)]
    return f" Did you mean {' or '.join(repr(w) for w in near)}?" if near else ""
