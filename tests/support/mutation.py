"""Small faults in the source of a module, one at a time, to see whether a test notices.

``mutants_of`` lists the faults: another comparison, ``or`` for ``and``, a condition negated, a
number one higher or lower, a statement removed.  ``plant`` puts one into the imported module, in
place, so that other modules that have imported its functions have the fault too.  Text is left
alone: docstrings, sentences, annotations, decorators.  ``support.mutation_run`` is the command.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_METHODS = FunctionType, property, cached_property, staticmethod, classmethod
_LEFT_ALONE = ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom


class CannotPlantError(Exception):
    """A function uses other names of its surroundings than before: it must be made anew."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault in one module."""

    module: str
    function: str
    """Qualified name; empty for a statement of the module."""
    line: int
    last_line: int
    """Of the statement, without the block that it opens."""
    number: int
    """Of the change, in the order of ``mutants_of``."""
    old: str
    new: str

    @property
    def is_executed_at_import(self) -> bool:
        """Whether it is in no function: no test executes its line, but all use what it made."""
        return not self.function or self.function.rsplit(".")[-1].lstrip("_")[:1].isupper()

    @property
    def diff(self) -> str:
        """For people."""
        place = self.function or "the module"
        return f"{self.module}:{self.line} in {place}\n- {self.old}\n+ {self.new}"


@dataclass(slots=True)
class _Change:
    statement: ast.stmt
    function: str
    do: Callable[[], None]
    undo: Callable[[], None]


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All faults that can be planted in a module."""
    tree = ast.parse(source)
    found = []
    for number, change in enumerate(_changes(tree)):
        statement = change.statement
        old, (line, last_line) = _headline(statement), _lines(statement)
        change.do()
        new = _headline(statement)
        change.undo()
        if old != new:
            found.append(Mutant(module, change.function, line, last_line, number, old, new))
    return found


def mutated(source: str, number: int) -> ast.Module:
    """The source with one of its faults."""
    tree = ast.parse(source)
    change = list(_changes(tree))[number]
    change.do()
    return ast.fix_missing_locations(tree)


def read_at_import(tree: ast.AST, *, annotations: bool) -> Iterator[str]:
    """The names with which a module computes while it is imported, in annotations or elsewhere."""
    for name, value in ast.iter_fields(tree):
        is_annotation = name in {"annotation", "returns"}
        if is_annotation and not annotations:
            continue
        if name == "body" and isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                yield part.id
            elif isinstance(part, ast.AST):
                yield from read_at_import(part, annotations=annotations)


def plant(module: ModuleType, tree: ast.Module) -> None:
    """Give a module, and those who have imported from it, the functions of another source."""
    fresh = ModuleType(module.__name__)
    fresh.__file__ = module.__file__
    exec(compile(tree, module.__file__ or "", "exec"), vars(fresh))  # noqa: S102 - our own source
    for name, value in vars(fresh).items():
        live: Any = vars(module).get(name)
        if isinstance(value, FunctionType | type):
            if value.__module__ == module.__name__:
                _transplant(live, value)
        elif hasattr(value, "cache_clear"):
            _transplant(live, value)
        elif is_plain(value) and not name.startswith("__"):
            _replace(name, live, value)


def is_plain(value: Any) -> bool:
    """Whether a constant is data, and so no other one made of the classes of a second source."""
    if isinstance(value, tuple | frozenset | set | list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, int | float | str | bytes)


def _transplant(live: Any, fresh: Any) -> None:
    """Make functions do what others do, also those of a class and those that are wrapped."""
    if isinstance(fresh, type):
        for name, value in vars(fresh).items():
            if isinstance(value, _METHODS) or hasattr(value, "cache_clear"):
                _transplant(vars(live)[name], value)
        return
    for part in ("__wrapped__", "__func__", "fget", "fset", "func"):
        if isinstance(getattr(fresh, part, None), FunctionType) or hasattr(
            getattr(fresh, part, None), "cache_clear"
        ):
            _transplant(getattr(live, part), getattr(fresh, part))
    if hasattr(fresh, "cache_clear"):
        live.cache_clear()
    elif isinstance(fresh, FunctionType):
        if live.__code__.co_freevars != fresh.__code__.co_freevars:
            raise CannotPlantError(fresh.__qualname__)
        live.__code__ = fresh.__code__
        _transplant_defaults(live, fresh)


def _transplant_defaults(live: Any, fresh: Any) -> None:
    """Those that are data: an object that a second source has made is a stranger here."""
    if fresh.__defaults__:
        pairs = zip(live.__defaults__, fresh.__defaults__, strict=True)
        live.__defaults__ = tuple(new if is_plain(new) else old for old, new in pairs)
    if fresh.__kwdefaults__:
        data = {name: value for name, value in fresh.__kwdefaults__.items() if is_plain(value)}
        live.__kwdefaults__ = {**live.__kwdefaults__, **data}


def _replace(name: str, old: Any, new: Any) -> None:
    """Replace a constant wherever it has been imported under its name."""
    for module in list(sys.modules.values()):
        if name in getattr(module, "__dict__", {}) and vars(module)[name] is old:
            setattr(module, name, new)


# --- where faults can be ---


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for statement in tree.body:
        if not (_is_dunder(statement) or _is_annotation(statement)):
            yield from _in_statement(statement, "")


def _in_statement(statement: ast.stmt, place: str) -> Iterator[_Change]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        place = f"{place}.{statement.name}".lstrip(".")
        for part in statement.body:
            yield from _in_statement(part, place)
        return
    if isinstance(statement, _LEFT_ALONE) or _is_text(statement):
        return
    if place and _is_removable(statement):
        yield _removal(statement, place)
    for node in _expressions(statement):
        for do, undo in _in_expression(node):
            yield _Change(statement, place, do, undo)
    yield from _in_condition(statement, place)
    for part in _blocks(statement):
        yield from _in_statement(part, place)


def _blocks(statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statements within a statement."""
    for block in ("body", "orelse", "finalbody"):
        yield from getattr(statement, block, [])
    for handler in getattr(statement, "handlers", []):
        yield from handler.body


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """All expressions of a statement that are no text, without those of its blocks."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            yield node
        for name, value in ast.iter_fields(node):
            if name == "annotation":
                continue
            parts = value if isinstance(value, list) else [value]
            waiting += [
                part
                for part in parts
                if isinstance(part, ast.AST)
                and not isinstance(part, ast.stmt | ast.ExceptHandler | ast.JoinedStr)
            ]


_Pair = tuple[Callable[[], None], Callable[[], None]]


def _set(node: Any, name: str, new: Any) -> _Pair:
    old = getattr(node, name)
    return lambda: setattr(node, name, new), lambda: setattr(node, name, old)


def _in_expression(node: ast.AST) -> Iterator[_Pair]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _set(node, "ops", [_COMPARISONS[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        yield _set(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _bare(node)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield _set(node, "op", _OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Constant):
        yield from _in_constant(node)
    elif isinstance(node, ast.IfExp) and not _is_negatable(node.test):
        yield _set(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        yield _set(node.func, "id", _CALLS[node.func.id])
    else:
        yield from _in_comprehension(node)


def _in_comprehension(node: ast.AST) -> Iterator[_Pair]:
    for part in getattr(node, "generators", []):
        if part.ifs and not _is_negatable(part.ifs[0]):
            yield _set(part, "ifs", [ast.UnaryOp(ast.Not(), part.ifs[0]), *part.ifs[1:]])


def _bare(node: ast.UnaryOp) -> _Pair:
    """``not x`` becomes ``x``: twice the same negation."""
    return _set(node, "operand", ast.UnaryOp(ast.Not(), node.operand))


def _in_constant(node: ast.Constant) -> Iterator[_Pair]:
    value = node.value
    if isinstance(value, bool):
        yield _set(node, "value", not value)
    elif isinstance(value, int | float):
        yield _set(node, "value", value + 1)
        yield _set(node, "value", value - 1)


def _in_condition(statement: ast.stmt, place: str) -> Iterator[_Change]:
    if isinstance(statement, ast.If | ast.While) and not _is_negatable(statement.test):
        negated = ast.UnaryOp(ast.Not(), statement.test)
        yield _Change(statement, place, *_set(statement, "test", negated))
    elif (
        isinstance(statement, ast.Return)
        and isinstance(statement.value, ast.Compare | ast.BoolOp)
        and not _is_negatable(statement.value)
    ):
        negated = ast.UnaryOp(ast.Not(), statement.value)
        yield _Change(statement, place, *_set(statement, "value", negated))


def _is_negatable(test: ast.expr) -> bool:
    """Whether the change of its operator negates an expression already."""
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not)
    ordered = ast.Lt | ast.LtE | ast.Gt | ast.GtE
    return (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and not isinstance(test.ops[0], ordered)
    )


def _is_removable(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return all(_is_part(target) for target in statement.targets)
    if isinstance(statement, ast.AugAssign):
        return _is_part(statement.target)
    if isinstance(statement, ast.Return):
        return statement.value is None
    return isinstance(statement, ast.Expr | ast.Delete | ast.Continue | ast.Break)


def _is_part(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(map(_is_part, target.elts))
    return isinstance(target, ast.Attribute | ast.Subscript)


def _removal(statement: ast.stmt, place: str) -> _Change:
    """Turn a statement into an assertion of True, which does nothing, and back."""
    kind, parts = type(statement), dict(vars(statement))

    def do() -> None:
        statement.__class__ = ast.Assert
        vars(statement).update(test=ast.Constant(True), msg=None)

    def undo() -> None:
        statement.__class__ = kind
        vars(statement).clear()
        vars(statement).update(parts)

    return _Change(statement, place, do, undo)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_annotation(statement: ast.stmt) -> bool:
    """Whether a statement names a type: bounds of messages have tests of their own."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Annotated"


def _is_dunder(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id.startswith("__") for target in statement.targets
    )


def _headline(statement: ast.stmt) -> str:
    """The statement in one line, without the block that it opens."""
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant):
        return "(removed)"
    if hasattr(statement, "body"):
        return ast.unparse(statement).splitlines()[0]
    return " ".join(ast.unparse(statement).split())


def _lines(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    last = statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, body[0].lineno - 1) if body else last
