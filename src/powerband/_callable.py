"""Let `powerband.plan(...)` call the stage, although `powerband.plan` is also the package that implements it."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _CallableModule(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("powerband.api"), stage)(*args, **kwargs)


def make_callable(name: str) -> None:
    """Make a stage's module callable: a call runs the function of that name in `powerband.api`."""
    sys.modules[name].__class__ = _CallableModule
