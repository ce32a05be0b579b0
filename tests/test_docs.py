"""README and docs: links lead somewhere, code blocks run, what is generated is current, and the site has every page and name.

A block of Python runs, with what `support/blocks.py` says that it finds; the blocks of one file run in one namespace, in
order. `python run` promises readers that the block runs as it is, without models of the hub. `python run on a GPU: REASON` says
why no other machine runs it. Commands are read by the parsers of the programs that they call.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
from contextlib import nullcontext
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path

import pytest

import group_offload
from docs import generated
from group_offload.cli.main import _parser

from .support.blocks import World, blocks, on_a_device, python_blocks, without_blocks
from .support.simulated import SimulatedDevice, use_simulated_device

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FILES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
names = [str(file.relative_to(ROOT)) for file in FILES]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HTML_LINK = re.compile(r"(?:src|href|srcset)=\"([^\"]+)\"")
_COMMAND = re.compile(
    r"^(?:\$ )?((?:group-offload|make|pip|python|\.venv/bin/\w+|[A-Z_]+=\S+ make) .+|\.ci/run.*)$", re.M
)

needs_today = pytest.mark.skipif(
    tuple(map(int, version("diffusers").split(".")[:2])) < (0, 42), reason="the docs are written for diffusers 0.42"
)
any_page = pytest.mark.parametrize("file", FILES, ids=names)


def anchors(file: Path) -> set[str]:
    """The anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(file.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links() -> None:
    """They lead somewhere, and one leads to each page: on GitHub there is no navigation."""
    broken, linked = [], set[Path]()
    for file in FILES:
        text = without_blocks(file.read_text())
        for link in (*_LINK.findall(text), *_HTML_LINK.findall(text)):
            path, _, anchor = link.partition("#")
            target = (file.parent / path).resolve() if path else file
            linked.add(target)
            if not re.match(r"[a-z]+:", link) and not (target.exists() and (not anchor or anchor in anchors(target))):
                broken.append((file, link))
    assert not broken and set(DOCS.rglob("*.md")) <= linked


# ------------------------------------------------------------------------------------------------ code


@needs_today
@pytest.mark.parametrize("file", [file for file in FILES if python_blocks(file)], ids=lambda file: file.stem)
def test_python_blocks(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [block for block in python_blocks(file) if not block.needs_gpu]  # tests/gpu/test_gpu_docs.py runs those
    world = World(tmp_path, monkeypatch)
    with on_a_device() if any("vram_budget" in block.code for block in found) else nullcontext():
        for block in found:
            world.run(block.code, str(file), block.line)
    group_offload.unpatch_diffusers()


@any_page
def test_blocks(file: Path) -> None:
    """One without a language holds what people read, and commands, which their programs take."""
    for block in blocks(file.read_text()):
        assert block.language in ("", "python") and (block.language or not block.mark), f"line {block.line}"
        assert block.mark in ("", "run") or block.needs_gpu, f"line {block.line}: say `run on a GPU: REASON`"
        if block.language:
            ast.parse(block.code)
        for command in _COMMAND.findall(block.code.replace("\\\n", " ")) if not block.language else ():
            check_command(re.split(r"\s{2,}", command)[0].rstrip(" "))


def check_command(command: str) -> None:
    program, *arguments = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
    if program == "group-offload":
        given = [word.strip("[]") for word in arguments]
        _parser().parse_args(given)
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets), command
    elif "-m" in arguments:
        assert find_spec(arguments[arguments.index("-m") + 1]) is not None, command
    elif program.endswith("pip"):
        for found in re.findall(r"\[([\w,]+)\]", command):
            assert set(found.split(",")) <= set(metadata("group-offload").get_all("Provides-Extra") or ()), command
    else:
        assert (ROOT / next(word for word in (program, *arguments) if "/" in word and "bin/" not in word)).exists(), (
            command
        )


# ------------------------------------------------------------------------------------------------ tables


@needs_today
def test_calls_that_replace_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs are Python, ours run, all with one pipeline."""
    page = DOCS / "switching.md"
    world = World(tmp_path, monkeypatch)
    world.run("from group_offload import *", str(page))
    head = r"^\|[^|\n]+\| group_offload \| what changes \|\n\|[-| ]+\|\n((?:\|.*\|\n)+)"
    tables = re.findall(head, page.read_text(), re.MULTILINE)
    rows = [row.removeprefix("| ").split(" | ") for table in tables for row in table.splitlines()]
    assert len(rows) > 20
    with use_simulated_device(SimulatedDevice(0, "eager")):  # nothing is computed there
        for theirs, ours, _ in rows:
            for code in re.findall(r"`([^`]+)`", theirs):
                ast.parse(code)
            world.run("\n".join(re.findall(r"`([^`]+)`", ours)), str(page))
            world.run("unpatch_diffusers(); [handle.remove() for handle in handles_of(pipe).values()]", str(page))


@pytest.mark.parametrize("page", ["api.md", "benchmarks.md"])
def test_generated_parts_are_up_to_date(page: str) -> None:
    """The tables of options and names are those of the docstrings, and each figure is one that a result holds."""
    path = DOCS / page
    text, parts = path.read_text(), generated.pages()[path]
    assert generated.parts_of(text).keys() == parts.keys()
    assert generated.with_parts(text, parts) == text, "run `make pages`"


def test_times_are_those_of_results() -> None:
    """Those in seconds with three decimals. Hazard: the docs give figures that no result has."""
    results = " ".join(file.read_text() for file in (ROOT / "benchmarks" / "results").rglob("*.json"))
    measured = {f"{float(number):.3f}" for number in re.findall(r"\d+\.\d+", results)}
    told = {time for page in PAGES for time in re.findall(r"\b\d+\.\d{3}(?= s\b)", page.read_text())}
    assert told - measured == set()


def test_the_docs_stay_small() -> None:
    """Whoever adds a page takes one away. What is generated does not count as words."""
    words = {page.name: len(generated.without_parts(page.read_text()).split()) for page in PAGES}
    assert len(words) <= 20
    assert sum(words.values()) <= 35_000, words


@pytest.mark.parametrize("word", ["OOM", "12GB", "Colab", 'pipe.to("cuda")', "notebook", "exit code 137"])
def test_the_docs_have_the_words_that_people_search_for(word: str) -> None:
    """The search finds whole words: `12 GB` is not `12GB`."""
    assert any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", page.read_text()) for page in PAGES)


# ------------------------------------------------------------------------------------------------ the site

DESCRIBED = re.findall(r"^<!-- ::: group_offload\.(\w+) -->$", (DOCS / "api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", group_offload.__all__)
def test_public_names_have_docstrings(name: str) -> None:
    """So have the methods, properties and fields of the classes, but for options that are explained once."""
    thing = getattr(group_offload, name)
    assert thing.__doc__
    if not inspect.isclass(thing):
        return
    source = inspect.getsource(thing)
    for key, value in vars(thing).items():
        if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert value.__doc__, f"{name}.{key}"
    for field in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
        if name == "OffloadConfig" and f" {field.name}: " in str(group_offload.apply_group_offloading.__doc__):
            continue
        assert re.search(rf'^    {field.name}: [^\n]+\n    """', source, re.MULTILINE), f"{name}.{field.name}"


def test_the_reference_shows_the_signatures_of_the_calls() -> None:
    """griffe reads the source; docs/griffe_options.py tells it what `@takes_options` does."""
    griffe = pytest.importorskip("griffe")
    found = griffe.load(
        "group_offload",
        search_paths=[ROOT],
        extensions=griffe.load_extensions("dataclasses", str(DOCS / "griffe_options.py")),
    )
    for name in DESCRIBED:
        thing = getattr(group_offload, name)
        if inspect.isfunction(thing) and name != "from_pretrained":  # its `**options` are those of another call
            shown = {each.name: each.kind.value for each in found[name].final_target.parameters}
            real = {each.name: each.kind.description for each in inspect.signature(thing).parameters.values()}
            assert shown == real, name


def test_names_in_the_docs_are_in_the_reference() -> None:
    """What a page calls `group_offload.name`, or imports from it, is public; what it calls of a handle, a handle has."""
    assert sorted(DESCRIBED) == sorted(group_offload.__all__)
    of_handles = {*dir(group_offload.OffloadHandle), *dir(group_offload.ActivationOffloadHandle)}
    for file in FILES:
        text = file.read_text()
        imported = re.findall(r"from group_offload import ([\w, ]+)", text)
        named = {name.strip() for line in imported for name in line.split(",")}
        named |= set(re.findall(r"`group_offload\.(\w+)\(", text))
        assert named <= {*DESCRIBED}, file
        assert set(re.findall(r"\bhandle\.([a-z]\w*)", text)) <= of_handles, file
