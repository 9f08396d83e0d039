"""A plugin of pytest that plants a mutant while its module is imported; see ``mutation_run``.

``POTLUCK_MUTANT=module:number`` names it.  So defaults of messages, and whatever other modules
compute from a constant, have the fault as well, which no later change of the module could do.
"""

from __future__ import annotations

import ast
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from hypothesis import Phase, settings

from support.mutation import mutated

PROFILE = "mutation"
settings.register_profile(
    PROFILE,
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=30,
    phases=[Phase.explicit, Phase.generate],
)


class _Loader(SourceFileLoader):
    """Compiles another program than the file has, and never takes one from the cache."""

    number = 0

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.get_filename(fullname)).decode()
        tree: ast.Module = mutated(source, self.number)
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code


class Finder(MetaPathFinder):
    """Finds one module before all others do."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module with the fault in it."""
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        loader = _Loader(fullname, spec.origin)
        loader.number = self.number
        spec.loader = loader
        return spec


def _plant() -> None:
    named = os.environ.get("POTLUCK_MUTANT")
    if named:
        module, number = named.split(":")
        sys.meta_path.insert(0, Finder(f"potluck.{module.replace('/', '.')}", int(number)))


_plant()
