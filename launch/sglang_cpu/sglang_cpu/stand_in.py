"""What makes a module importable whatever is asked of it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if (
            name.startswith("__") or name == "get_current_target"
        ):  # asked to find out if there is a GPU driver
            raise AttributeError(name)
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class StandIn(metaclass=_Anything):
    """Every attribute of it is itself. Called as a decorator it returns what it decorates, otherwise
    itself.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return cls


def attribute(name: str) -> Any:
    """A module's `__getattr__`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of `package`, however deep, and makes it a stand-in."""

    def __init__(self, package: str) -> None:
        self.prefix = package + "."

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self.prefix):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def make_submodules(package: str) -> None:
    """From now on `import package.anything.at.all` works."""
    sys.meta_path.append(_Submodules(package))
