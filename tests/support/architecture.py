"""The floor plan as data, and checkers that compare source code with it.

Every checker takes modules (parsed, never imported) and returns a list of sentences, one for each
violation; an empty list means the code keeps to the plan.  ``tests/test_architecture.py`` runs them
on ``src/potluck`` and on planted sources that must not pass.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "potluck"

# Layer -> the rooms (module or folder directly under the package) that belong to it.  A feature is
# one package, which is a layer of its own.
GROUND = (
    *("errors", "_types", "_platform", "_process", "_time", "_future", "_decode", "_values"),
    *("_version", "launch_env", "wire_messages", "logs"),
)
# From the bottom up; layers on the same floor are blind to one another.
FLOORS = (
    ("ground",),
    ("arrays", "metrics", "identity", "schedule"),
    ("net", "compression"),
    ("discovery",),
    ("trust",),
    ("backend", "membership"),
    ("trace",),
    ("collective",),
    ("cluster",),
    ("rpc",),
    ("training", "doctor"),
    ("torch",),
)
ROOMS = {
    **{layer: (layer,) for floor in FLOORS for layer in floor},
    "ground": GROUND,
    "apps": ("apps", "__main__"),
    "testing": ("testing",),
}


def _may_import() -> dict[str, frozenset[str]]:
    below: set[str] = set()
    allowed = {}
    for floor in FLOORS:
        for layer in floor:
            allowed[layer] = frozenset({layer, *below})
        below |= set(floor)
    library = below - {"torch"}
    allowed["root"] = frozenset(library)
    allowed["apps"] = frozenset({"apps", "root", *library})
    allowed["testing"] = frozenset({"testing", "root", *library})
    return allowed


# Layer -> the layers it may import.  The package root (the public names) is a layer of its own.
MAY_IMPORT = _may_import()

# What decides and never acts: no clock, no chance, no operating system, no socket, no thread.
PURE = (
    "schedule",
    "compression",
    "membership",
    "trust.pairing_code",
    "trust.pairing_protocol",
    "trust.roster",
    "trust.roster_records",
    "trust.admission",
    "backend.barrier",
    "backend.matching",
    "rpc.errors",
    "rpc.protocol",
    "training.steps",
)
_WITHOUT_ARRAYS = tuple(path for path in PURE if path not in {"schedule", "compression"})


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


_NETWORKED = (
    *("identity", "net", "discovery", "trust", "backend", "trace", "collective", "cluster"),
    *("rpc", "doctor", "apps", "testing"),
)

BANS = (
    Ban(
        frozenset({"threading", "_thread", "queue", "concurrent", "multiprocessing"}),
        "threads live where the network is; others only have locks",
        only=(*_NETWORKED, "metrics", "logs", "_process", "_future", "torch.work"),
    ),
    Ban(
        frozenset({"socket", "select", "selectors", "ssl"}),
        "bytes meet the network in net and in the layers that drive it",
        only=(*_NETWORKED, "_platform"),
    ),
    Ban(
        frozenset({"threading", "_thread", "queue", "concurrent", "multiprocessing"})
        | {"socket", "select", "selectors", "ssl"}
        | {"time", "datetime", "random", "secrets", "uuid", "os", "subprocess", "signal"},
        "pure code knows no clock, no chance and no operating system: what it needs is passed in",
        never=PURE,
    ),
    Ban(
        frozenset({"fcntl", "termios", "resource", "pwd", "grp", "msvcrt", "winreg", "_winapi"}),
        "what only some platforms have is decided in one module",
        only=("_platform",),
    ),
    Ban(
        frozenset({"numpy", "ml_dtypes"}),
        "what decides about machines needs no arrays",
        never=_WITHOUT_ARRAYS,
    ),
    Ban(
        frozenset({"torch"}),
        "most users have no torch: it is imported only where it is the subject",
        only=("arrays.torch", "arrays.trees", "backend.adapters", "torch"),
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

PLATFORM_NAMES = frozenset({"sys.platform", "os.name"})
PLATFORM_MODULES = frozenset({"os", "socket", "select", "signal", "mmap", "time", "ssl"})
PLATFORM_GUARDS = frozenset({("net.tcp", "sys.platform")})
"""Around a class for one platform: the type checker follows nothing else."""

LINES_WANTED = 800
LINES_ALLOWED = 1300
FUNCTION_LINES_ALLOWED = 60  # without signature and docstring
POSITIONAL_ALLOWED = 6  # without self or cls
FOLDER_ALLOWED = 25  # modules in one folder
MODULES_ALLOWED = 190  # in the whole package, packages that only document or re-export excepted
SMALL = 150  # lines of code of a module with one importer in its package that gives no reason
SMALL_FILES: dict[str, str] = {
    "potluck.apps.cli.demo": "a file per command: the main command only lists them",
    "potluck.apps.cli.doctor": "a file per command: the main command only lists them",
    "potluck.arrays.jax": "a file per framework: none imports another one",
    "potluck.arrays.mlx": "a file per framework: none imports another one",
    "potluck.arrays.torch": "a file per framework: none imports another one",
    "potluck.backend.barrier": "pure: the path says so",
    "potluck.training.balance": "a subject of its own; elastic would be too long with it",
}
"""Small modules with one importer, each with the reason that it is a module all the same."""
ADAPTERS = ("arrays", "backend.adapters", "torch", "apps", "_platform")
"""Where objects of others are looked at by name."""


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


@functools.cache
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


def platforms(modules: Mapping[str, Module]) -> list[str]:
    """Only one module asks which platform this is and what the modules of Python have there."""
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                is_asking = ast.unparse(node) in PLATFORM_NAMES
            elif isinstance(node, ast.Call) and _called(node) in {"hasattr", "getattr"}:
                is_asking = ast.unparse(node.args[0]) in PLATFORM_MODULES
            else:
                continue
            if is_asking and (module.path, ast.unparse(node)) not in PLATFORM_GUARDS:
                found.append(f"{module.name}:{node.lineno} asks what potluck._platform answers")
    return [each for each in found if not each.startswith(f"{PACKAGE}._platform:")]


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


def folders(modules: Mapping[str, Module]) -> list[str]:
    """No folder, and not the whole, has more modules than a reader can survey."""
    counted = [each for each in modules.values() if not _only_documents(each)]
    found = [f"{PACKAGE} has {len(counted)} modules"] if len(counted) > MODULES_ALLOWED else []
    sizes = Counter(each.name.rpartition(".")[0] for each in counted)
    return [
        *found,
        *(f"{name} has {count} modules" for name, count in sizes.items() if count > FOLDER_ALLOWED),
    ]


def _only_documents(module: Module) -> bool:
    return module.is_package and not any(
        isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.FunctionDef) and node.name not in {"__getattr__", "__dir__"})
        for node in module.tree.body
    )


def fragments(modules: Mapping[str, Module]) -> list[str]:
    """A small module with one importer in its package is a piece of that importer.

    Unless it gives a reason, which lapses when it is not needed.
    """
    importers = defaultdict(set)
    for module in modules.values():
        for item in imports_of(module, modules):
            importers[item.target].add(module.name)
    found = {}
    for module in modules.values():
        if module.is_package or not module.path or module.name.endswith("__main__"):
            continue
        package = module.name.rpartition(".")[0]
        known_to = importers[module.name]
        if len(known_to) == 1 and _code_lines(module) < SMALL:
            (importer,) = known_to
            if importer.rpartition(".")[0] == package:
                found[module.name] = f"{module.name} is small and only {importer} imports it"
    stale = (name for name in SMALL_FILES if name in modules and name not in found)
    return sorted(
        [
            *(text for name, text in found.items() if name not in SMALL_FILES),
            *(f"{name} needs no excuse (any more)" for name in stale),
        ]
    )


def _code_lines(module: Module) -> int:
    lines = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.stmt) and not _is_text(node):
            lines.add(node.lineno)
            lines.add(node.end_lineno or node.lineno)
    return len(lines)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _classes(modules: Mapping[str, Module]) -> Iterator[tuple[Module, ast.ClassDef]]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                yield module, node


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _bases(node: ast.ClassDef) -> list[str]:
    return [_name_of(base) for base in node.bases]


def class_names(modules: Mapping[str, Module]) -> list[str]:
    """A public class name is defined once in the tree."""
    places = defaultdict(list)
    for module, node in _classes(modules):
        if not node.name.startswith("_"):
            places[node.name].append(module.path)
    return sorted(
        f"{name} is defined in {', '.join(sorted(where))}"
        for name, where in places.items()
        if len(where) > 1
    )


def cut_classes(modules: Mapping[str, Module]) -> list[str]:
    """A class is not cut up: no base of ours that nothing uses but one heir.

    A base that is made by itself, such as a plain connection beside an encrypted one, is a class.
    """
    homes, heirs = defaultdict(list), defaultdict(list)
    made = {
        node.func.id
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for module, node in _classes(modules):
        homes[node.name].append((module, node))
        for base in _bases(node):
            heirs[base].append((module, node))
    errors = _errors(homes)
    found = []
    for name, places in homes.items():
        if len(places) != 1 or len(heirs[name]) != 1:
            continue
        (module, node), (other, heir) = places[0], heirs[name][0]
        is_seam = name in errors or not {"Protocol", "ABC"}.isdisjoint(_bases(node))
        if not is_seam and heir is not node and name not in made:
            found.append(f"{other.path}.{heir.name} is the only heir of {module.path}.{name}")
    return sorted(found)


def _errors(homes: Mapping[str, list[tuple[Module, ast.ClassDef]]]) -> set[str]:
    """Names of the classes that are exceptions, heirs included."""
    found: set[str] = set()
    while True:
        more = {
            name
            for name, places in homes.items()
            for _, node in places
            for base in _bases(node)
            if base in found or base.endswith(("Error", "Exception", "Warning"))
        }
        if more == found:
            return found
        found = more


def single_protocols(modules: Mapping[str, Module]) -> list[str]:
    """No Protocol with one implementation; fakes in ``testing`` count, as do heirs by name."""
    classes = list(_classes(modules))
    members = {id(node): _members(node) for _, node in classes}
    found = []
    for module, protocol in classes:
        if "Protocol" not in _bases(protocol) or len(members[id(protocol)]) < 2:
            continue
        implementing = [
            node
            for _, node in classes
            if node is not protocol
            and "Protocol" not in _bases(node)
            and (protocol.name in _bases(node) or members[id(protocol)] <= members[id(node)])
        ]
        if len(implementing) < 2:
            found.append(f"{module.path}.{protocol.name} has {len(implementing)} implementations")
    return sorted(found)


def _members(node: ast.ClassDef) -> set[str]:
    names = set()
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item in node.body:
            names.add(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.Assign) and item in node.body:
            names |= {each.id for each in item.targets if isinstance(each, ast.Name)}
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            names.add(item.attr)
    return {name for name in names if not name.startswith("__")}


def smuggled_state(modules: Mapping[str, Module]) -> list[str]:
    """State belongs to the object that owns it: not reached through vars, __dict__ or getattr."""
    found = set()
    for module in modules.values():
        if _within(module.path, ADAPTERS) or module.layer == "root":
            continue
        for place, node in _placed(module.tree, module.path):
            if isinstance(node, ast.Subscript):
                text = ast.unparse(node.value)
                if text.startswith("vars(") or text.endswith(".__dict__"):
                    found.add(f"{place} uses {text}[...]")
            elif isinstance(node, ast.Call) and _called(node) == "getattr" and len(node.args) > 1:
                name = node.args[1]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found.add(f"{place} uses getattr(..., {name.value!r})")
    return sorted(found)


def generated_methods(modules: Mapping[str, Module]) -> list[str]:
    """Every method is written where it is: none is made by locals() or set from outside."""
    found = set()
    for module in modules.values():
        for place, node in _placed(module.tree, module.path):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node.func)
            if text in {"locals().update", "vars().update"}:
                found.add(f"{place} makes methods by {text}")
            if text == "setattr" and place == module.path:
                found.add(f"{place} sets {ast.unparse(node.args[0])} from outside")
    return sorted(found)


def _placed(node: ast.AST, place: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node with the class or function that it stands in."""
    for child in ast.iter_child_nodes(node):
        inside = place
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{place}.{child.name}"
        yield place, child
        yield from _placed(child, inside)


Check = Callable[[Mapping[str, Module]], list[str]]
CHECKS: tuple[Check, ...] = (
    layering,
    banned_imports,
    banned_calls,
    platforms,
    cycles,
    functions,
    docstrings,
    folders,
)

# Rules that the tree does not keep everywhere yet: what is listed in architecture_debts.py is
# allowed to stay, and nothing else.
SHRINKING: tuple[Check, ...] = (
    fragments,
    class_names,
    cut_classes,
    single_protocols,
    smuggled_state,
    generated_methods,
)
