"""The site can be built: navigation, links and anchors, references, and notes of code blocks.

`make site` checks the same with MkDocs, which is not in the environment of the tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs import contract_reference, decisions_reference, errors, hooks, recipes, sdk_reference
from tests.support.code_blocks import (
    PYTHON,
    ROOT,
    SHELL,
    SHOWN,
    Block,
    blocks_of,
    commands_of,
    pages,
)

from tinsmith.v1 import errors_pb2

DOCS = ROOT / "docs"
# Written when the site is built.
GENERATED = "reference/"


@pytest.fixture(scope="module")
def navigation() -> list[str]:
    nav: list[Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return list(hooks.pages_of(hooks.expand(nav, DOCS)))


def blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a page, as Markdown makes them of its headings."""
    found: set[str] = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", hooks.without_fences(path.read_text())):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found.add(slug if slug not in found else f"{slug}_1")
    return found


def test_every_page_is_in_the_navigation_once(navigation: list[str]) -> None:
    named = [name for name in navigation if not name.startswith(GENERATED)]
    assert len(named) == len(set(named))
    written = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if not path.is_relative_to(DOCS / GENERATED)
    }
    assert set(named) == written


@pytest.mark.parametrize("page", pages())
def test_links_and_anchors_lead_somewhere(page: str) -> None:
    path = ROOT / page
    missing = []
    for target in hooks.links(path.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if other.is_relative_to(DOCS / GENERATED):
            # MkDocs looks at these; here their folders are enough.
            assert other.relative_to(DOCS / GENERATED).parts[0] in {
                "sdk",
                "cli",
                "contract",
                "decisions.md",
            }
        elif not other.exists() or (anchor and anchor not in anchors_of(other)):
            missing.append(target)
    assert not missing, missing


def test_every_block_of_code_is_run_or_says_why_not() -> None:
    unknown = [
        f"{block.page}:{block.line}: {block.language}"
        for block in blocks()
        if block.language not in {PYTHON, *SHELL, *SHOWN}
    ]
    assert not unknown, unknown
    for block in blocks():
        place = f"{block.page}:{block.line}"
        if block.note == "not run":
            assert len(block.what.split()) >= 3, f"{place} does not say why it is not run"
        if block.note.endswith(" by"):
            file, _, test = block.what.partition("::")
            assert f"def {test}(" in (ROOT / file).read_text(), f"{place}: no test {block.what}"


def test_every_reason_of_an_error_has_an_entry() -> None:
    found = {entry.reason for entry in errors.entries()}
    names = errors_pb2.ErrorReason.DESCRIPTOR.values_by_name
    wanted = {name.removeprefix("ERROR_REASON_") for name in names}
    assert found == wanted - {"UNSPECIFIED"}


def test_the_page_of_errors_is_that_of_the_code() -> None:
    assert errors.PAGE.read_text() == errors.page(), "run make docs"


def test_the_page_of_recipes_is_that_of_the_code() -> None:
    assert recipes.PAGE.read_text() == recipes.page(), "run make docs"
    rows = [line for line in recipes.page().splitlines() if line.startswith("| `")]
    assert [line for line in rows if line.endswith("|  |")] == []
    assert any("| `learning_rate` |" in line for line in rows)


def test_the_contract_is_described_from_its_comments() -> None:
    found = contract_reference.pages()
    protos = {path.stem for path in (ROOT / "proto/tinsmith/v1").glob("*.proto")}
    assert {f"contract/{name}.md" for name in protos} < set(found)
    trainer = found["contract/trainer.md"]
    assert "### ForwardBackward\n" in trainer
    assert "`ForwardBackwardRequest` → `google.longrunning.Operation`" in trainer
    assert "(`QUEUE_FULL`)" in trainer


def test_the_sdk_is_described_from_its_docstrings() -> None:
    found = sdk_reference.pages()
    assert "### forward_backward\n" in found["sdk/training.md"]
    assert "await forward_backward_async" in found["sdk/training.md"]
    assert "## Client.checkpoints\n" in found["sdk/resources.md"]
    assert "| `learning_rate` | `float` | `0.0001` |" in found["sdk/values.md"]
    assert not [name for name, text in found.items() if " object at 0x" in text]


def test_every_decision_is_listed() -> None:
    [text] = decisions_reference.pages().values()
    assert all(f"(../adr/{path.name})" in text for path in (DOCS / "adr").glob("*.md"))
    assert "| 50 | [The documentation is a site" in text


@pytest.mark.parametrize("path", sorted((DOCS / "adr").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_says_whether_it_holds(path: Path) -> None:
    _, _, status, *_ = path.read_text().splitlines()
    holds = r"\*\*Status\.\*\* (In force|Superseded by \[.*\]\((.*\.md)\))\."
    found = re.fullmatch(holds, status)
    assert found, status
    assert found[2] is None or (path.parent / found[2]).is_file()


def test_links_out_of_the_site_become_paths() -> None:
    text = "See [a sample](../k8s/samples/sft.yaml), [`k8s`](../k8s), [limits](limits.md).\n"
    assert hooks.localize(text, "jobs.md") == (
        "See a sample (`k8s/samples/sft.yaml`), `k8s`, [limits](limits.md).\n"
    )
    fenced = "```text\n[a](../b.py)\n```\n"
    assert hooks.localize(fenced, "jobs.md") == fenced
    assert hooks.localize("[x](../../proto)", "guides/rl.md") == "x (`proto`)"


def test_a_twin_has_no_comments_and_leads_to_twins() -> None:
    text = "<!-- not run: a reason -->\n```bash\nls\n```\nSee [all](../scenarios/README.md#a).\n"
    assert hooks.twin_of(text) == "```bash\nls\n```\nSee [all](../scenarios/index.md#a).\n"


def test_the_summary_of_a_page_is_its_first_sentence() -> None:
    text = "# Title\n\n<!-- note -->\n![picture](a.png)\n\nFirst [one](b.md), then two. Third.\n"
    assert hooks.summary_of(text) == "First one, then two."


def test_commands_are_told_from_what_they_print() -> None:
    code = "$ cat > a <<END\n> one\n> END\n$ wc -l a\n1 a ...\n...\nend\n"
    first, second = commands_of(Block("a.md", 1, "console", code))
    assert (first.text, first.shown) == ("cat > a <<END\none\nEND\n", "")
    assert second.text == "wc -l a\n"
    assert first.prints("\n")
    assert second.prints("1 a of b  \n\nmore\nand more\nend\n")
    assert second.prints("1 a of b\nend\n")
    assert not second.prints("2 a of b\nmore\nend\n")
    assert not second.prints("1 a of b\nmore\n")
    assert not second.prints("1 a\nof b\nends\n")
