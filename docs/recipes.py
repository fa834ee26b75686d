"""Writes recipes.md: each recipe, what it does, and its settings.

The source is that of `tinsmith run RECIPE --help`.
"""

from __future__ import annotations

import inspect

from docs.descriptors import ROOT

from tinsmith.cli.recipe import RECIPES, describe_scenarios, load_recipe
from tinsmith.cli.recipe_settings import RecipeSetting, settings_of

PAGE = ROOT / "docs/recipes.md"
_HEAD = """# Settings of recipes

Generated from the code by `make docs`: what `tinsmith run RECIPE --help` says. A setting is a word
`name=value` behind the recipe, or a line of the file of `--config`. `--dry-run` shows what
`supervised` or `dpo` would train on, and makes no run. [The guides](guides/index.md) have an
example of each recipe, and say what [the columns](guides/index.md#what-the-columns-say) of its
output mean.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for recipe in RECIPES:
        module = load_recipe(recipe)
        parts += [
            f"## {recipe}\n",
            f"{inspect.cleandoc(module.__doc__ or '')}\n",
            "| setting | default | kind | meaning |\n| --- | --- | --- | --- |",
            *map(_row, settings_of(module.Config)),
            "",
        ]
    parts.append(f"## scenario\n\n```text\n{describe_scenarios().strip()}\n```\n")
    return "\n".join(parts)


def _row(setting: RecipeSetting) -> str:
    default = f"`{setting.default}`" if setting.default else ""
    meaning = setting.meaning.replace("|", "\\|")
    return f"| `{setting.name}` | {default} | {setting.kind} | {meaning} |"
