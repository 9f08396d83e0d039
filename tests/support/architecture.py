"""The floor plan as data, and checkers that compare source code with it.

Every checker takes modules (parsed, never imported) and returns a list of sentences, one for each
violation; an empty list means the code keeps to the plan.  ``tests/test_architecture.py`` runs them
on ``src/potluck`` and on planted sources that must not pass.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "potluck"

# Layer -> the rooms (module or folder directly under the package) that belong to it.
ROOMS = {
    "ground": (
        "errors",
        "vocabulary",
        "closing",
        "forking",
        "decoding",
        "config",
        "messages",
        "metrics",
        "logs",
        "arrays",
    ),
    "core": ("core",),
    "collective": ("collective",),
    "net": ("net",),
    "backend": ("backend",),
    "runtime": ("runtime",),
    "training": ("training",),
    "apps": ("apps", "__main__"),
    "testing": ("testing",),
    "torch": ("torch",),
}
_UP_TO_BACKEND = frozenset({"ground", "core", "collective", "net", "backend"})

# Layer -> the layers it may import.  The package root (the public names) is a layer of its own.
MAY_IMPORT = {
    "ground": frozenset({"ground"}),
    "core": frozenset({"ground", "core"}),
    "collective": frozenset({"ground", "collective"}),
    "net": frozenset({"ground", "net"}),
    "backend": _UP_TO_BACKEND,
    "runtime": _UP_TO_BACKEND | {"runtime"},
    "training": _UP_TO_BACKEND | {"runtime", "training"},
    "apps": _UP_TO_BACKEND | {"runtime", "training", "apps", "root"},
    "testing": _UP_TO_BACKEND | {"runtime", "training", "testing", "root"},
    "torch": frozenset({"ground", "training"}),
    "root": _UP_TO_BACKEND | {"runtime", "training"},
}


@dataclass(frozen=True)
class Ban:
    """Outside modules that only some places may import, and why.

    Places are paths below the package ("net", "arrays.torch") and hold for everything under them.
    """

    modules: frozenset[str]
    reason: str
    only: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()

    def covers(self, place: str) -> bool:
        """Whether a module at this place must do without."""
        if self.only is not None:
            return not _within(place, self.only)
        return _within(place, self.never)


def _within(place: str, roots: Iterable[str]) -> bool:
    return any(place == root or place.startswith(f"{root}.") for root in roots)


_NETWORKED = ("net", "backend", "runtime", "apps", "testing")

BANS = (
    Ban(
        frozenset({"threading", "_thread", "queue", "concurrent", "multiprocessing"}),
        "threads live in net, backend and runtime; metrics, logs, forking, holding only have locks",
        only=(*_NETWORKED, "metrics", "logs", "forking", "training.holding"),
    ),
    Ban(
        frozenset({"socket", "select", "selectors", "ssl"}),
        "bytes meet the network in net and in the layers that drive it",
        only=_NETWORKED,
    ),
    Ban(
        frozenset({"time", "datetime", "random", "secrets", "uuid", "os", "subprocess", "signal"}),
        "pure code knows no clock, no chance and no operating system: what it needs is passed in",
        never=("core", "collective"),
    ),
    Ban(frozenset({"numpy", "ml_dtypes"}), "core decides without arrays", never=("core",)),
    Ban(
        frozenset({"torch"}),
        "most users have no torch: it is imported only where it is the subject",
        only=("arrays.torch", "backend.engines", "training", "torch"),
    ),
    Ban(
        frozenset({"asyncio"}),
        "one model of concurrency, threads; no event loop of our own",
        only=("apps",),
    ),
    Ban(
        frozenset({"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}),
        "bytes from outside must never become code",
        only=(),
    ),
)
BANNED_CALLS = frozenset({"eval", "exec", "compile"})

LINES_WANTED = 800
LINES_ALLOWED = 1300
FUNCTION_LINES_ALLOWED = 60  # without signature and docstring
POSITIONAL_ALLOWED = 6  # without self or cls


@dataclass(frozen=True)
class Module:
    """One source file, parsed."""

    name: str  # "potluck.net.frames"; a package has the name of its folder
    source: str
    tree: ast.Module
    is_package: bool

    @property
    def path(self) -> str:
        """The path below the package, as a name with dots: "net.frames"; "" for the root."""
        return self.name.removeprefix(PACKAGE).removeprefix(".")

    @property
    def layer(self) -> str | None:
        """The layer this module belongs to, None if the plan has no such room."""
        room = self.path.partition(".")[0]
        if not room:
            return "root"
        return next((layer for layer, rooms in ROOMS.items() if room in rooms), None)

    @property
    def lines(self) -> int:
        """How long the file is."""
        return len(self.source.splitlines()) - _example_lines(self.source)


@dataclass(frozen=True)
class Import:
    """One imported module, wherever in the file and for whatever purpose."""

    target: str
    line: int


def parse(sources: Mapping[str, str], packages: Iterable[str] = ()) -> dict[str, Module]:
    """Modules from source texts by name, for planted code."""
    packages = {PACKAGE, *packages}
    return {
        name: Module(name, source, ast.parse(source), name in packages)
        for name, source in sources.items()
    }


def load(folder: Path) -> dict[str, Module]:
    """Every module below the package folder."""
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        parts = (PACKAGE, *file.relative_to(folder).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        source = file.read_text(encoding="utf-8")
        modules[name] = Module(name, source, ast.parse(source, str(file)), is_package)
    return modules


def imports_of(module: Module, known: Mapping[str, Module]) -> Iterator[Import]:
    """Everything the module imports: inside functions, for types only, or by a literal name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield Import(submodule if submodule in known else base, node.lineno)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            name = _literal(node)
            if name is not None:
                yield Import(name, node.lineno)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_dynamic_import(node: ast.Call) -> bool:
    return _called(node).strip("_") in {"import_module", "import"}


def _literal(node: ast.Call) -> str | None:
    name = node.args[0] if node.args else None
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        return name.value
    return None


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def layering(modules: Mapping[str, Module]) -> list[str]:
    """Imports point down only, and every module stands in a room of the plan."""
    found = []
    for module in modules.values():
        if module.layer is None:
            found.append(f"{module.name} stands in no room of the floor plan")
            continue
        for item in imports_of(module, modules):
            if not _is_ours(item.target):
                continue
            target = Module(item.target, "", ast.Module([], []), is_package=False).layer
            if target not in MAY_IMPORT[module.layer]:
                found.append(
                    f"{module.name}:{item.line} imports {item.target}: "
                    f"{module.layer} may not know {target}"
                )
    return found


def banned_imports(modules: Mapping[str, Module]) -> list[str]:
    """Outside modules stay in the layers that may use them."""
    found = []
    for module in modules.values():
        for item in imports_of(module, modules):
            outside = item.target.partition(".")[0]
            found += [
                f"{module.name}:{item.line} imports {item.target}: {ban.reason}"
                for ban in BANS
                if outside in ban.modules and ban.covers(module.path)
            ]
    return found


def banned_calls(modules: Mapping[str, Module]) -> list[str]:
    """No text becomes code, and no import hides behind a computed name (the root excepted)."""
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            where = f"{module.name}:{node.lineno}"
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                found.append(f"{where} calls {node.func.id}()")
            if any(
                word.arg == "allow_pickle" and not _is_false(word.value) for word in node.keywords
            ):
                found.append(f"{where} allows pickle")
            if _is_dynamic_import(node) and _literal(node) is None and module.layer != "root":
                found.append(f"{where} imports a module whose name is computed")
    return found


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def cycles(modules: Mapping[str, Module]) -> list[str]:
    """Imports form no circle, imports for types included."""
    graph = {
        name: {item.target for item in imports_of(module, modules)} & modules.keys() - {name}
        for name, module in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"import cycle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def file_sizes(modules: Mapping[str, Module], excused: Mapping[str, str]) -> list[str]:
    """Files keep to the budget; an excuse needs a reason and lapses when it is not needed."""
    found = []
    for module in modules.values():
        if module.lines > LINES_ALLOWED:
            found.append(f"{module.name} has {module.lines} lines; never more than {LINES_ALLOWED}")
        elif module.lines > LINES_WANTED and not excused.get(module.name):
            found.append(
                f"{module.name} has {module.lines} lines and no reason to exceed {LINES_WANTED}"
            )
    stale = (name for name in excused if name not in modules or modules[name].lines <= LINES_WANTED)
    return [*found, *(f"{name} needs no excuse (any more)" for name in stale)]


def functions(modules: Mapping[str, Module]) -> list[str]:
    """Functions are short and take few positional parameters."""
    found = []
    for module in modules.values():
        for node, is_method in _functions(module.tree, within_class=False):
            where = f"{module.name}.{node.name}:{node.lineno}"
            if (lines := _body_lines(node)) > FUNCTION_LINES_ALLOWED:
                found.append(f"{where} has {lines} lines; never more than {FUNCTION_LINES_ALLOWED}")
            positional = len(node.args.posonlyargs) + len(node.args.args)
            bound = is_method and not any(
                isinstance(mark, ast.Name) and mark.id == "staticmethod"
                for mark in node.decorator_list
            )
            if positional - bound > POSITIONAL_ALLOWED:
                found.append(
                    f"{where} takes {positional - bound} positional parameters; "
                    f"beyond {POSITIONAL_ALLOWED} use keywords or a config"
                )
    return found


def _functions(
    node: ast.AST, *, within_class: bool
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, within_class
            yield from _functions(child, within_class=False)
        else:
            yield from _functions(
                child, within_class=within_class or isinstance(child, ast.ClassDef)
            )


def _example_lines(source: str) -> int:
    """Lines of examples in docstrings: they are tests, and no file should lack one for its size."""
    count, within = 0, False
    for line in source.splitlines():
        text = line.strip()
        within = text.startswith(">>> ") or (within and text not in {"", '"""'})
        count += within
    return count


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body:
        return 0
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1


def docstrings(modules: Mapping[str, Module]) -> list[str]:
    """Every module says in at least one sentence what it is for."""
    return [
        f"{module.name} has no docstring that is a sentence"
        for module in modules.values()
        if not _is_sentence(ast.get_docstring(module.tree))
    ]


def _is_sentence(text: str | None) -> bool:
    summary = (text or "").partition("\n\n")[0]
    return len(summary.split()) >= 3 and summary.rstrip().endswith((".", "!", "?", ":"))


Check = Callable[[Mapping[str, Module]], list[str]]
CHECKS: tuple[Check, ...] = (
    layering,
    banned_imports,
    banned_calls,
    cycles,
    functions,
    docstrings,
)
