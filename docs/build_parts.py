"""The generated parts of pages: each function is a table or a diagram made from the code."""

from __future__ import annotations

import importlib.util
import inspect
import types
import typing
from pathlib import Path

import msgspec

from potluck import wire_messages as wire
from potluck.cluster import io
from potluck.doctor.checks import CHECKS, check_keys
from potluck.membership import messages as membership_messages
from potluck.metrics.catalogue import SECTIONS
from potluck.net import frames, listener, tls
from support import architecture

__all__ = [
    "comparison",
    "doctor_checks",
    "frame_kinds",
    "frame_layout",
    "layers",
    "limits",
    "may_import",
    "messages",
    "metrics",
    "origin_names",
]

_TITLES = {
    "backend": "The backends of `ferrotorch_distributed`",
    "rpc": "Its remote calls",
    "root": "The root of `pmetal_distributed`",
}

TESTS = Path(__file__).parent.parent / "tests"

HOLDS = {
    "ground": "errors, small types, clocks, decoding and logs that all layers share",
    "arrays": "arrays of every framework as flat memory",
    "metrics": "what a process counts",
    "identity": "keys, names, namespaces and the private files that hold them",
    "schedule": "collectives as data: algorithms, cost, choice and proof",
    "net": "bytes: frames, sockets, TLS, encrypted records, dialling, listening",
    "compression": "gradients in fewer bytes",
    "discovery": "how nodes find each other",
    "trust": "pairing, the roster and admission",
    "backend": "messages between ranks over TCP, in process, or within a subgroup",
    "membership": "decisions: state machines that take a message and the time",
    "trace": "the flight recorder and its dumps",
    "collective": "schedules are run: groups, executor, public collectives",
    "cluster": "control thread, connections, views as calls see them, observers",
    "rpc": "remote calls",
    "training": "elastic steps, checkpoints, samplers",
    "doctor": "why nodes do not meet",
    "torch": "`potluck.torch`: the process group of PyTorch",
    "root": "`potluck/__init__.py`: the public names, loaded when first used",
    "apps": "the programs a person runs",
    "testing": "fakes that ship with the library; nothing else imports them",
}


# -- the floor plan ----------------------------------------------------------------------------


def layers() -> str:
    """The layers as a diagram: an arrow means "may import", those that follow are left out."""
    allowed = {name: set(may) - {name} for name, may in architecture.MAY_IMPORT.items()}
    lines = ["```mermaid", "graph TD"]
    for name, may in allowed.items():
        rooms = " · ".join(architecture.ROOMS.get(name, ("__init__",)))
        lines.append(f'  {name}["{name}<br/>{rooms}"]' if rooms != name else f"  {name}[{name}]")
        reached = {far for near in may for far in allowed[near]}
        lines += [f"  {name} --> {near}" for near in allowed if near in may - reached]
    return "\n".join([*lines, "```", ""])


def may_import() -> str:
    """Layer, what it holds, and what else it may import."""
    order = list(architecture.MAY_IMPORT)
    rows = []
    for layer, may in architecture.MAY_IMPORT.items():
        others = " ".join(f"`{other}`" for other in order if other in may and other != layer)
        rows.append(f"| `{layer}` | {HOLDS[layer]} | {others or 'nothing'} |")
    return _table("| layer | what it holds | may also import |", rows)


# -- the wire ----------------------------------------------------------------------------------


def frame_layout() -> str:
    """The fields of a header with their offsets."""
    names = ("magic", "version", "kind", "group", "epoch", "tag", "operation", "piece", "length")
    sizes = {"2s": 2, "B": 1, "Q": 8, "I": 4}
    codes = ("2s", "B", "B", "Q", "I", "I", "Q", "I", "I")
    assert "<" + "".join(codes) == frames._LAYOUT.format
    rows, offset = [], 0
    for name, code in zip(names, codes, strict=True):
        fixed = {"magic": f"`{frames.MAGIC.decode()}`", "version": f"{frames.LAYOUT}"}
        rows.append(f"| {offset} | {sizes[code]} | `{name}` | {fixed.get(name, '')} |")
        offset += sizes[code]
    assert offset == frames.HEADER_SIZE
    table = _table("| offset | bytes | field | always |", rows)
    return f"A header has {frames.HEADER_SIZE} bytes; integers are little-endian.\n\n{table}"


def frame_kinds() -> str:
    """Every kind with its number, its limit and what it means."""
    docs = _docs_below(frames.FrameType)
    rows = []
    for kind in frames.FrameType:
        limit = frames._LIMITS.get(int(kind), frames.MAX_CONTROL)
        shown = "the receiver's credit" if kind is frames.FrameType.EAGER else _size(limit)
        rows.append(f"| {int(kind)} | `{kind.name}` | {shown} | {docs[kind.name]} |")
    return _table("| kind | name | payload at most | |", rows)


def messages() -> str:
    """Every message of an opening, with its fields and their bounds."""
    parts = []
    for name in wire.__all__:
        message = getattr(wire, name)
        if not (isinstance(message, type) and issubclass(message, msgspec.Struct)):
            continue
        tag = message.__struct_config__.tag
        title = f"**`{name}`**" + (f", tag `{tag}`" if tag else "")
        rows = [
            f"| `{field.name}` | {_type(field.type)} | {'' if field.required else 'yes'} |"
            for field in msgspec.structs.fields(message)
        ]
        about = (inspect.getdoc(message) or "").splitlines()[0]
        parts.append(f"{title}: {about}\n\n" + _table("| field | type | may be left out |", rows))
    return "\n".join(parts)


def limits() -> str:
    """What a peer may cost, before and after it is known."""
    callers = listener
    places = f"{callers.SLOTS} places, {callers.SLOTS_PER_HOST} for one host"
    rows = [
        f"| a caller who has not said who it is | {callers.PATIENCE:g} s, {places} |",
        f"| bytes of a TLS handshake | {_size(tls.MAX_HANDSHAKE)} |",
        f"| payload of a frame, unless said otherwise | {_size(frames.MAX_CONTROL)} |",
        f"| payload of a `DATA` or `COLLECTIVE` frame | {_size(frames.MAX_PIECE)} |",
        f"| a message of the cluster's core | {_size(membership_messages.MAX_MESSAGE)} |",
        f"| members of a view | {membership_messages.MAX_MEMBERS} |",
        f"| bytes that wait for a peer who does not read | {_size(io.MAX_OUTBOX)} |",
    ]
    return _table("| what | at most |", rows)


def comparison() -> str:
    """The figures of the README."""
    text = (TESTS.parent / "README.md").read_text(encoding="utf-8")
    start = text.index("| | compared with | Potluck |")
    return text[start : text.index("\n\n", start)] + "\n"


# -- the doctor, the origin --------------------------------------------------------------------


QUESTIONS = {
    "keys": "Can this machine's own keys be used?",
    "interfaces": "Is there any network interface to use?",
    "platforms": "Does the operating system block connections?",
    "taken": "Do other programs use the ports of discovery?",
    "names": "Do host names resolve to the right machines?",
    "multicast": "Do announcements leave this machine, and reach the others?",
    "isolation": "Does the network isolate its clients, as guest networks do?",
    "families": "Do two machines share IPv4 or IPv6?",
    "ports": "Can the machines that were found be reached on their port?",
    "passages": "Do packets of full size get through, and at what rate?",
    "namespaces": "Do the machines have the same secret?",
    "clones": "Does another machine have a copy of this one's key?",
    "versions": "Do the machines use the same version of the protocol?",
    "clocks": "Do the clocks agree?",
    "power": "Will the machines stay awake?",
    "pairing": "Is this machine paired with any other?",
    "nobody": "Is there any other machine?",
}
"""What each check of the doctor finds out."""


def doctor_checks() -> str:
    """The checks in the order in which they are made."""
    rows = []
    for check in (check_keys, *CHECKS):
        family = check.__name__.removeprefix("check_")
        causes = (inspect.getdoc(check) or "").splitlines()[0]
        rows.append(f"| `{family}` | {QUESTIONS[family]} | {causes} |")
    return _table("| check | question | examples |", rows)


def origin_names() -> str:
    """The names of the documents that Potluck began with, and where they are now."""
    file = TESTS / "test_seed_names.py"
    spec = importlib.util.spec_from_file_location("seed_names", file)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    parts = []
    for key, title in _TITLES.items():
        rows = []
        for name, place in table.TABLES[key].items():
            where = getattr(place, "path", None)
            here = f"`{where}`" if where else getattr(place, "sentence", "planned")
            rows.append(f"| `{name}` | {here} |")
        parts.append(f"### {title}\n\n" + _table("| there | here |", rows))
    return "\n".join(parts)


# -- words -------------------------------------------------------------------------------------


def metrics() -> str:
    """Every metric: name, kind, labels and meaning, by subject."""
    parts = []
    for title, section in SECTIONS.items():
        rows = [
            f"| `{each.name}` | {each.kind} | {', '.join(f'`{name}`' for name in each.labels)} "
            f"| {each.help} |"
            for each in section
        ]
        table = ["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows]
        parts.append("\n".join([f"### {title}", "", *table, ""]))
    return "\n".join(parts)


def _table(head: str, rows: list[str]) -> str:
    rule = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([head, rule, *rows, ""])


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def _docs_below(kind: type) -> dict[str, str]:
    """The strings below the assignments of a class."""
    import ast

    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for target, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(target, ast.Assign) and isinstance(text, ast.Expr):
            assert isinstance(target.targets[0], ast.Name)
            assert isinstance(text.value, ast.Constant)
            sentence = " ".join(str(text.value.value).split())
            found[target.targets[0].id] = sentence.replace("``", "`")
    return found


def _type(kind: typing.Any) -> str:
    """A type with its bounds, in words."""
    if typing.get_origin(kind) is typing.Annotated:
        base, *metas = typing.get_args(kind)
        return ", ".join([_type(base), *(_bounds(meta) for meta in metas)])
    if typing.get_origin(kind) is list:
        return f"list of {_type(typing.get_args(kind)[0])}"
    if isinstance(kind, types.UnionType):
        return " or ".join(_type(each) for each in typing.get_args(kind))
    name = "nothing" if kind is types.NoneType else kind.__name__
    return f"`{name}`" if name in wire.__all__ else name


def _bounds(meta: msgspec.Meta) -> str:
    words = []
    if meta.min_length is not None and meta.min_length == meta.max_length:
        return f"exactly {meta.max_length}"
    if meta.max_length is not None:
        words.append(f"at most {meta.max_length}")
    if meta.ge is not None:
        words.append(f"from {meta.ge}")
    if meta.le is not None:
        words.append(f"to {meta.le}")
    if meta.lt is not None:
        words.append(f"below 2^{int(meta.lt).bit_length() - 1}")
    return " ".join(words)
