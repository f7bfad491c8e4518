"""Be the program under test: in a forked, confined child of the supervisor.

`script` is the program as `python main.py` would run it. `call` loads it as a module, calls one function and writes
the JSON of what it returned to file descriptor `RESULT_FD`. No expected value is anywhere in this process.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

RESULT_FD = 3
FILE = "main.py"
# What LeetCode-style solutions use without importing it: these modules, and the public names of some of them.
OPEN_MODULES = ("bisect", "collections", "functools", "heapq", "itertools", "math", "string", "typing")
MODULES = (*OPEN_MODULES, "json", "os", "random", "re", "sys")


def run(kind: str, source: bytes, job: dict[str, Any]) -> None:
    """Run it and end the process, with the exit code and the last acts of an interpreter.

    What is left out is the interpreter's own dismantling, module by module, which takes longer than most tests.
    """
    code = 0
    try:
        _run(kind, source, job)
    except SystemExit as exit:
        code = _exit_code(exit.code)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except Exception:
            code = code or 120  # as the interpreter does
    os._exit(code)


def conveniences() -> dict[str, Any]:
    """Return the names that LeetCode-style solutions expect. None hides a builtin: `pow` stays `pow`."""
    names: dict[str, Any] = {name: __import__(name) for name in MODULES}
    for module in (names[name] for name in OPEN_MODULES):
        for name in getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]:
            if name not in vars(builtins) and name not in names:
                names[name] = getattr(module, name)
    return names


def _exit_code(given: Any) -> int:
    """Return what `sys.exit(given)` means."""
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF
    print(given, file=sys.stderr)
    return 1


def _run(kind: str, source: bytes, job: dict[str, Any]) -> None:
    _fresh_streams()
    sys.argv[:] = [FILE]
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path != job["package_path"])]
    for name in [name for name in sys.modules if name == "inside" or name.startswith("inside.")]:
        del sys.modules[name]
    for word in ("exit", "quit"):  # the `site` module would define them; it is not loaded here
        setattr(builtins, word, _sitebuiltins.Quitter(word, ""))
    if kind == "script":
        _load(source, "__main__", builtins)
        return
    # As builtins, not as names of the module: a function that is asked for must be the program's own.
    module = _load(source, "solution", vars(builtins) | conveniences())
    returned = _function(module, job["function"])(*job["args"], **job["kwargs"])
    import json

    payload = json.dumps(returned, default=_plain).encode()
    with open(RESULT_FD, "wb", closefd=False) as result:
        result.write(payload)


def _load(source: bytes, name: str, builtin_names: ModuleType | dict[str, Any]) -> ModuleType:
    module = type(sys)(name)
    module.__dict__.update(__builtins__=builtin_names, __file__=FILE)
    sys.modules[name] = module
    exec(compile(source, FILE, "exec", dont_inherit=True), module.__dict__)
    return module


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a top-level function, or a method of `class Solution` as LeetCode asks for."""
    found = module.__dict__.get(name)
    if found is None and "Solution" in module.__dict__:
        found = getattr(module.__dict__["Solution"](), name, None)
    if found is None:
        raise NameError(f"the program defines no function {name!r}")
    return found


def _plain(value: Any) -> Any:
    """Turn arrays and numbers of numerical libraries, and double-ended queues, into what JSON knows."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if type(value).__name__ == "deque":
        return list(value)
    raise TypeError(f"the function returned a {type(value).__name__}, which JSON cannot hold")


def _fresh_streams() -> None:
    """Make the streams as a new interpreter would: the supervisor's were made for other files."""
    for name, number, mode, errors in (
        ("stdin", 0, "r", "surrogateescape"),
        ("stdout", 1, "w", "surrogateescape"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
