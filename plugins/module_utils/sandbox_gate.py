"""The small language that code of an answer may be written in; anything else is refused before it runs.

This file and the other ``sandbox_*`` files without Ansible's imports are also sent to the isolated process, where
the gate runs: not even the parsing of hostile text happens in the process that judges.

The gate allows what is listed and nothing else: kinds of syntax, names, attributes, modules. It is the first of
two walls; the second is the process it runs in (``sandbox_isolation``), which holds without it.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import heapq  # noqa: F401 - Counter.most_common loads it when called, and then there are no files
import itertools
import math
import random
import re
import types
import unicodedata  # noqa: F401 - the parser loads it for names that are not ASCII
from collections.abc import Callable, Iterator
from typing import Any

MAX_CODE_BYTES = 32 * 1024
MAX_PRINTED = 64 * 1024
MAX_FINDINGS = 8

#: What a module offers to the code. Left out on purpose: whatever takes the name of an attribute or evaluates text
#: (functools.update_wrapper, operator, collections.namedtuple, typing.get_type_hints).
MODULES: dict[str, tuple[str, ...]] = {
    "math": tuple(name for name in dir(math) if not name.startswith("_")),
    "itertools": tuple(name for name in dir(itertools) if not name.startswith("_")),
    "functools": ("cache", "cmp_to_key", "lru_cache", "partial", "reduce"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "re": (
        "I", "IGNORECASE", "compile", "escape", "findall", "finditer", "fullmatch", "match", "search", "split", "sub",
    ),
    "random": ("choice", "randint", "random", "randrange", "sample", "seed", "shuffle"),
    "typing": (
        "Any", "Callable", "Dict", "Generator", "Iterable", "Iterator", "List", "Optional", "Sequence", "Set",
        "Tuple", "Union",
    ),
}  # fmt: skip
_REAL_MODULES = {
    "math": math,
    "itertools": itertools,
    "functools": functools,
    "collections": collections,
    "random": random,
    "re": re,
}

_BUILTINS = (
    "ArithmeticError", "AssertionError", "Exception", "False", "IndexError", "KeyError", "LookupError", "None",
    "NotImplementedError", "OverflowError", "RuntimeError", "StopIteration", "True", "TypeError", "ValueError",
    "ZeroDivisionError", "abs", "all", "any", "bin", "bool", "bytearray", "bytes", "chr", "complex", "dict",
    "divmod", "enumerate", "filter", "float", "frozenset", "hash", "hex", "int", "isinstance", "iter", "len",
    "list", "map", "max", "min", "next", "oct", "ord", "pow", "range", "repr", "reversed", "round", "set", "slice",
    "sorted", "str", "sum", "tuple", "zip",
)  # fmt: skip
#: Replaced by harmless ones of the same name, see :func:`environment`.
_REPLACED = ("print", "type")
#: Built in only where the module site was loaded.
_SITE = ("copyright", "credits", "exit", "help", "license", "quit")
_VALUE_TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, type(None))

#: format and format_map read attributes that their text names; encode and decode load codecs from files.
_NEVER = frozenset({"format", "format_map", "encode", "decode"})
#: Of exceptions, cached functions and matches.
_RESULTS = frozenset({"args", "cache_clear", "cache_info", "end", "group", "groups", "span", "start"})
ATTRIBUTES = (
    frozenset(
        name
        for owner in (*_VALUE_TYPES, collections.Counter, collections.deque)
        for name in dir(owner)
        if not name.startswith("_") and name not in _NEVER
    )
    | frozenset(name for names in MODULES.values() for name in names)
    | _RESULTS
)

_NODES: tuple[type[ast.AST], ...] = (
    ast.Module, ast.FunctionDef, ast.Return, ast.Delete, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For,
    ast.While, ast.If, ast.Raise, ast.Try, ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal,
    ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BoolOp, ast.NamedExpr, ast.BinOp, ast.UnaryOp, ast.Lambda,
    ast.IfExp, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Yield,
    ast.YieldFrom, ast.Compare, ast.Call, ast.FormattedValue, ast.JoinedStr, ast.Constant, ast.Attribute,
    ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.comprehension, ast.ExceptHandler,
    ast.arguments, ast.arg, ast.keyword, ast.alias, ast.expr_context, ast.boolop, ast.operator, ast.unaryop,
    ast.cmpop,
)  # fmt: skip


class OutputFloodError(Exception):
    """The code printed more than it may."""


def check(code: str) -> tuple[ast.Module | None, str, list[str]]:
    """Parse code and say what in it lies outside the small language.

    Args:
        code: Python source, at most :data:`MAX_CODE_BYTES` bytes.

    Returns:
        The tree without annotations (None when it is not to be run), the fault of syntax (empty when none), and
        what the code tried, at most :data:`MAX_FINDINGS` texts; the tree is None whenever either is not empty.
    """
    try:
        # rejects lone surrogates as well, which the parser cannot take
        size = len(code.encode())
        if size > MAX_CODE_BYTES:
            return None, "", [f"code of {size} bytes, more than {MAX_CODE_BYTES}"]
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        return None, f"not Python: {error}"[:200], []
    except (MemoryError, RecursionError):
        return None, "", ["code nested deeper than the parser can follow"]
    findings: list[str] = []
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assigned |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    assigned |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assigned |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        findings.extend(text for text in _findings(node, assigned) if text not in findings)
        if len(findings) >= MAX_FINDINGS:
            break
    if findings:
        return None, "", findings[:MAX_FINDINGS]
    return _without_annotations(tree), "", []


def environment() -> dict[str, Any]:
    """Make the globals that checked code runs in."""
    offered: dict[str, Any] = {name: getattr(builtins, name) for name in _BUILTINS}
    offered["print"] = _quiet_print()
    offered["type"] = _type
    offered["__import__"] = _import
    return {"__name__": "answer", "__builtins__": offered}


def _findings(node: ast.AST, assigned: set[str]) -> Iterator[str]:
    if not isinstance(node, _NODES):
        yield f"uses {type(node).__name__}"
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from _import_findings(node)
    elif isinstance(node, ast.Attribute):
        if not isinstance(node.ctx, ast.Load):
            yield f"changes the attribute {_short(node.attr)}"
        elif node.attr not in ATTRIBUTES:
            yield f"reads the attribute {_short(node.attr)}"
    elif isinstance(node, ast.Name):
        yield from _name_findings(node, assigned)
    else:
        for name in _bound_names(node):
            if name.startswith("__"):
                yield f"binds the name {_short(name)}"


def _import_findings(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        if module == "__future__":
            return
        if module not in MODULES:
            yield f"imports {_short(module)}"
            return
        for alias in node.names:
            if alias.name not in MODULES[module]:
                yield f"imports {_short(alias.name)} from {module}"
    else:
        for alias in node.names:
            if alias.name not in MODULES:
                yield f"imports {_short(alias.name)}"
    for alias in node.names:
        if (alias.asname or "").startswith("__"):
            yield f"binds the name {_short(str(alias.asname))}"


def _name_findings(node: ast.Name, assigned: set[str]) -> Iterator[str]:
    name = node.id
    if name.startswith("__"):
        # asked by nearly every example of use, and false here
        if name != "__name__" or not isinstance(node.ctx, ast.Load):
            yield f"uses the name {_short(name)}"
    elif (
        (hasattr(builtins, name) or name in _SITE)
        and name not in _BUILTINS
        and name not in _REPLACED
        and name not in assigned
    ):
        yield f"calls {name}"


def _bound_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg is not None):
        yield str(node.arg)
    elif isinstance(node, ast.ExceptHandler) and node.name is not None:
        yield node.name
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names


class _Strip(ast.NodeTransformer):
    """Takes annotations away, so that nothing is evaluated in them and typing's names need no meaning."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)


def _without_annotations(tree: ast.Module) -> ast.Module:
    stripped: ast.Module = _Strip().visit(tree)
    return ast.fix_missing_locations(stripped)


def _quiet_print() -> Callable[..., None]:
    printed = 0

    def quiet_print(*values: object, sep: object = " ", end: object = "\n", **_ignored: object) -> None:
        nonlocal printed
        printed += sum(len(str(value)) for value in values) + len(str(sep)) + len(str(end))
        if printed > MAX_PRINTED:
            raise OutputFloodError(f"printed more than {MAX_PRINTED} characters")

    return quiet_print


def _type(value: object) -> type:
    # the real one makes classes, and hands out types whose constructors build functions out of code
    kind = type(value)
    if kind not in _VALUE_TYPES:
        raise TypeError("type() is for plain values here")
    return kind


class _Inert:
    """Stands for any name of typing outside annotations, such as an alias."""

    def __getitem__(self, _item: object) -> _Inert:
        return self

    def __or__(self, _other: object) -> _Inert:
        return self


def _import(
    name: str, _globals: object = None, _locals: object = None, _fromlist: object = (), level: int = 0
) -> types.SimpleNamespace:
    # a namespace of the offered names only: a real module leads to its loader and its own imports
    if level or (name not in MODULES and name != "__future__"):
        raise ImportError(f"no module {name!r} here")
    if name in ("typing", "__future__"):
        return types.SimpleNamespace(**{entry: _Inert() for entry in (*MODULES["typing"], "annotations")})
    return types.SimpleNamespace(**{entry: getattr(_REAL_MODULES[name], entry) for entry in MODULES[name]})


def _short(name: str) -> str:
    return name if len(name) <= 40 else name[:40] + "..."  # noqa: PLR2004
