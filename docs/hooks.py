"""How the site differs from these folders on GitHub: where two pages of the root stand, what links become, and anchors.

MkDocs calls the functions `on_...` (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

logger = logging.getLogger("mkdocs.plugins.hooks")  # a warning is an error where the build is strict

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
ALONE = ("index", "quickstart", "troubleshooting", "benchmarks", "how-it-works", "contributing")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
ISSUES = re.compile(r"diffusers(?: #\d+,?)+")
DOCSTRING = re.compile(r"^<!-- (::: .+) -->$", re.MULTILINE)
FENCE = re.compile(r"^( *)```(\w*)[^\n]*$", re.MULTILINE)


def slug(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", separator)


def place_of(path: Path) -> str:
    """Where a file stands on the site: pages of docs/ where they are, and files that they link to in folders of their own."""
    if path.is_relative_to(DOCS) and path.suffix != ".py":
        return path.relative_to(DOCS).as_posix()
    inside = path.relative_to(ROOT).as_posix()
    place = f"source/{inside}.txt" if path.suffix == ".md" else f"source/{inside}"  # Markdown would become a page
    return FROM_ROOT.get(inside, place)


def source_of(file: Any) -> Path:
    return Path(file.abs_src_path)


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """The pages of the root, and every file outside of docs/ that a page links to: results of benchmarks."""
    for name, place in FROM_ROOT.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    for page in [each for each in files if each.src_uri.endswith(".md")]:
        for link in LINK.finditer(source_of(page).read_text()):
            target = (source_of(page).parent / link[2]).resolve()
            place = place_of(target) if target.is_relative_to(ROOT) and target.is_file() else ""
            if place.startswith("source/") and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead to where files stand here, a code block says its language only, and docstrings come in."""
    if page.file.src_uri.removesuffix(".md") in ALONE:
        page.meta["hide"] = ["navigation"]  # each is alone in its part
    folder = source_of(page.file).parent
    here = Path(place_of(source_of(page.file))).parent

    def moved(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if re.match(r"[a-z]+:", link[2]) or not target.is_relative_to(ROOT):
            return link[0]
        return f"{link[1]}{Path(os.path.relpath(place_of(target), here)).as_posix()}{link[3] or ''}{link[4]}"

    def linked(issues: re.Match[str]) -> str:
        return re.sub(r"#(\d+)", r"[#\1](https://github.com/huggingface/diffusers/issues/\1)", issues[0])

    markdown = DOCSTRING.sub(r"\1", markdown)  # GitHub, which cannot show them, sees a comment
    return FENCE.sub(r"\1```\2", ISSUES.sub(linked, LINK.sub(moved, markdown)))


def on_page_content(html: str, **_: Any) -> str:
    """Calls and names in tables may break behind a dot, an underscore or a bracket."""
    return re.sub(r"<td.*?</td>", lambda cell: re.sub(r"<code>[^<]+", _breakable, cell[0]), html, flags=re.DOTALL)


def on_post_build(config: Any) -> None:
    """The index of the search as a script, too: pages that were opened as files cannot fetch it."""
    index = Path(config.site_dir) / "search" / "search_index"
    index.with_suffix(".js").write_text(f"var __index = {index.with_suffix('.json').read_text()}")


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"(::|[(._=])(?=\w)", r"\1<wbr>", code[0])


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """A page that would fetch something fails the strict build."""
    for fetched in re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"((?:https?:)?//[^\"]+)", output):
        logger.warning(f"{page.file.src_uri} fetches {fetched}")
