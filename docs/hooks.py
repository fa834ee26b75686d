"""Hooks of MkDocs, run by `make site`: globs of the navigation, outer links, Markdown twins.

Each page is also there as Markdown, under its name with `.md`; `llms.txt` lists these twins by the
sections of the navigation. A link to a file of the repository that is no page becomes its path.
The functions without MkDocs' types are used by the tests, too, where MkDocs is not installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]+)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"(?ms)^( *)(```+).*?^\1\2 *$")
_COMMENT = re.compile(r"(?ms)^<!--.*?-->\n?")
_SENTENCE = re.compile(r"(?<=[.:!?])\s")
_TWINS: dict[str, str] = {}


def expand(entries: list[Any], folder: Path) -> list[Any]:
    """Return the navigation with the files that each glob names, in the order of their names."""
    return [_expand(entry, folder) for entry in entries]


def _expand(entry: Any, folder: Path) -> Any:
    if not isinstance(entry, dict):
        return entry
    [(title, value)] = entry.items()
    if isinstance(value, list):
        return {title: expand(value, folder)}
    if "*" in value:
        found = sorted(path.relative_to(folder).as_posix() for path in folder.glob(value))
        return {title: sorted(found, key=lambda name: not name.endswith("/index.md"))}
    return entry


def pages_of(entries: list[Any]) -> Iterator[str]:
    """Yield the pages that a navigation without globs lists."""
    for entry in entries:
        if isinstance(entry, dict):
            for value in entry.values():
                yield from pages_of(value if isinstance(value, list) else [value])
        else:
            yield entry


def links(text: str) -> Iterator[str]:
    """Yield the targets of the links and pictures of a page, but for those in code."""
    for found in re.finditer(r"\[[^\]\[]*\]\(([^)\s]+)\)", _without_code(text)):
        yield found.group(1)


def localize(text: str, page: str) -> str:
    """Return a page whose links to files outside of the site, or to folders, are their paths."""
    parts = []
    at = 0
    for fence in _FENCE.finditer(text):
        parts += [_localize(text[at : fence.start()], page), fence.group()]
        at = fence.end()
    return "".join([*parts, _localize(text[at:], page)])


def _localize(text: str, page: str) -> str:
    return _LINK.sub(lambda found: _path_of(found, PurePosixPath("docs", page)), text)


def _path_of(found: re.Match[str], page: PurePosixPath) -> str:
    target = found["target"]
    if "://" in target or target.startswith(("#", "mailto:")):
        return found.group()
    parts: list[str] = []
    for part in (page.parent / target.partition("#")[0]).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    if parts[:1] == ["docs"] and "." in parts[-1]:
        return found.group()
    path = "/".join(parts)
    return found["text"] if path in found["text"] else f"{found['text']} (`{path}`)"


def without_fences(text: str) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", text)


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]+`", "", without_fences(text))


def summary_of(text: str) -> str:
    """Return the first sentence of a page's text."""
    plain = _COMMENT.sub("", _FENCE.sub("", text))
    for paragraph in re.split(r"\n\s*\n", plain):
        line = " ".join(paragraph.split())
        if line and line[0] not in "#!|<-" and not line.startswith("* "):
            return _SENTENCE.split(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", line))[0]
    return ""


def twin_of(text: str) -> str:
    """Return a page as its twin: without comments, and with the names that twins have."""
    return re.sub(r"(\]\([^)\s]*)\bREADME\.md", r"\1index.md", _COMMENT.sub("", text))


def on_config(config: Any) -> Any:
    """Expand the globs of the navigation."""
    config["nav"] = expand(config["nav"], Path(config["docs_dir"]))
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links out of the site, and keep the page for its twin."""
    text = localize(markdown, page.file.src_uri)
    _TWINS[page.file.src_uri] = twin_of(text)
    return text


def on_post_build(config: Any) -> None:
    """Write the twins, and `llms.txt` with a line for each."""
    site = Path(config["site_dir"])
    for name, text in _TWINS.items():
        # A README is the index of its folder on the site.
        (site / _twin_name(name)).parent.mkdir(parents=True, exist_ok=True)
        (site / _twin_name(name)).write_text(text, encoding="utf-8")
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section in config["nav"]:
        [(title, entries)] = section.items()
        lines += ["", f"## {title}", ""]
        for name in pages_of(entries):
            text = _TWINS[name]
            found = re.search(r"(?m)^# (.+)$", text)
            heading = found.group(1) if found else name
            lines.append(f"- [{heading}]({_twin_name(name)}): {summary_of(text)}".rstrip(": "))
    (site / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _twin_name(name: str) -> str:
    return re.sub(r"(^|/)README\.md$", r"\1index.md", name)
