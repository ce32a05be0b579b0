"""What is generated in these pages: the reference in api.md and the tables in benchmarks.md. `make pages` writes both.

A generated part of a page stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import group_offload

DOCS = Path(__file__).resolve().parent
PART = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(<!-- end: \2 -->)", re.DOTALL)
TOPICS = {
    "Offload and restore": (
        "enable_group_offload",
        "disable_group_offload",
        "apply_group_offloading",
        "remove_group_offloading",
        "from_pretrained",
        "handle_of",
        "handles_of",
        "write_report",
        "patch_diffusers",
        "unpatch_diffusers",
        "free_device_buffers",
        "GroupOffloadStrategy",
    ),
    "Handles, statistics and plans": (
        "OffloadHandle",
        "OffloadStats",
        "GroupInfo",
        "OffloadPlan",
        "OffloadConfig",
        "OffloadType",
    ),
    "Activations in training": (
        "apply_activation_offloading",
        "ActivationOffloadHandle",
        "ActivationStats",
        "ActivationOffloadCallback",
    ),
    "Errors": ("GroupOffloadError", "ConfigError", "DeviceError", "ModuleError", "StateError", "StorageError"),
}
_DEFAULT = " Default: "


# ------------------------------------------------------------------------------------------------ pages


def with_parts(page: str, parts: Mapping[str, str]) -> str:
    """The text of a page with these generated parts, each in the place of the one that has its name."""
    names = {found[2] for found in PART.finditer(page)}
    assert parts.keys() <= names, f"The page has no place for {sorted(parts.keys() - names)}"
    return PART.sub(lambda part: f"{part[1]}\n{parts[part[2]]}\n\n{part[4]}" if part[2] in parts else part[0], page)


def parts_of(page: str) -> dict[str, str]:
    """The generated parts of a page, by name."""
    return {part[2]: part[3].strip() for part in PART.finditer(page)}


def without_parts(page: str) -> str:
    """The text of a page that somebody has written."""
    return PART.sub("", page)


def write(path: Path, parts: Mapping[str, str]) -> None:
    path.write_text(with_parts(path.read_text(), parts))


# ------------------------------------------------------------------------------------------------ the reference


def reference() -> dict[str, str]:
    """The generated parts of api.md."""
    return {
        "options": options(group_offload.apply_group_offloading),
        "options of pipelines": options(group_offload.enable_group_offload, ("exclude_modules", "model_options")),
        "names": "\n\n".join(f"## {topic}\n\n{_names(names)}" for topic, names in TOPICS.items()),
    }


def options(function: Any, names: tuple[str, ...] | None = None) -> str:
    """A table of a call's options: the default, and what its docstring says of each."""
    parameters = inspect.signature(function).parameters
    rows = []
    for name, text in documented(function).items():
        if parameters[name].default is inspect.Parameter.empty or (names is not None and name not in names):
            continue
        what, _, default = text.partition(_DEFAULT)
        default = default.removesuffix(".") or f"`{parameters[name].default!r}`".replace("'", '"')
        rows.append(f"| `{name}` | {default} | {what} |")
    return "\n".join(["| option | default | what it does |", "|---|---|---|", *rows])


def documented(function: Any) -> dict[str, str]:
    """The `Args:` of a docstring: the text of each argument."""
    lines = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(function) or "", re.MULTILINE | re.DOTALL)
    assert lines is not None
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", lines[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _names(names: tuple[str, ...]) -> str:
    things = {name: getattr(group_offload, name) for name in names}
    rows = [f"| `{_shown(name, thing)}` | {_summary(thing)} |" for name, thing in things.items()]
    tables = [_table("name", rows)]
    for name, thing in things.items():
        members = _members(thing) if inspect.isclass(thing) else []
        if members:
            tables.append(f"Of `{name}`:\n\n{_table('member', members)}")
    details = "\n\n".join(f"<!-- ::: group_offload.{name} -->" for name in names)
    return "\n\n".join([*tables, details])


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([f"| {head} | what it does |", "|---|---|", *rows])


def _shown(name: str, thing: Any) -> str:
    if inspect.isfunction(thing):
        return name + _parameters(thing)
    bases = ", ".join(base.__name__ for base in thing.__bases__)
    return f"{name}({bases})" if issubclass(thing, Exception) else name


def _parameters(function: Any) -> str:
    """The names and defaults of a call. Those that the tables of options list are left out."""
    texts = []
    for each in inspect.signature(function).parameters.values():
        if each.name == "self":
            continue
        if each.name in _OPTIONS:
            texts.append("**options")
            break
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        if each.kind == each.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "" if each.default is each.empty else f"={each.default!r}".replace("'", '"')
        texts.append(f"{stars}{each.name}{default}")
    return f"({', '.join(texts)})"


_OPTIONS = set(inspect.signature(group_offload.apply_group_offloading).parameters) - {"module"}


def _members(kind: type) -> list[str]:
    """The public methods, properties and fields of a class, and what their docstrings begin with."""
    rows = []
    if issubclass(kind, Exception):
        return rows
    fields = _fields(kind)
    for name, value in vars(kind).items():
        if name.startswith("_") or name in fields:
            continue
        if inspect.isfunction(value):
            rows.append(f"| `{name}{_parameters(value)}` | {_summary(value)} |")
        elif isinstance(value, property):
            rows.append(f"| `{name}` | {_summary(value)} |")
    return [*(f"| `{name}` | {text} |" for name, text in fields.items()), *rows]


def _fields(kind: type) -> dict[str, str]:
    """The fields of a dataclass, or the members of an enum, whose docstrings stand below them."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        target = field.target if isinstance(field, ast.AnnAssign) else None
        if isinstance(field, ast.Assign):
            (target,) = field.targets
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(target, ast.Name) and not target.id.startswith("_") and is_text:
            found[target.id] = _in_one_line(text.value.value)
    return found


def _summary(thing: Any) -> str:
    return _in_one_line((inspect.getdoc(thing) or "").partition("\n\n")[0])


def _in_one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ------------------------------------------------------------------------------------------------ all pages


def pages() -> dict[Path, dict[str, str]]:
    """The generated parts of each page, but for the matrix of classes, which `make matrix` measures and writes."""
    from benchmarks.page import tables

    return {DOCS / "api.md": reference(), DOCS / "benchmarks.md": tables()}


if __name__ == "__main__":
    for path, parts in pages().items():
        write(path, parts)
