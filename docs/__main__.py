"""`python -m docs [--check]`: write the pages that the code makes, or say which are stale."""

from __future__ import annotations

import argparse
import sys

from docs import architecture, errors, limits, metrics, permissions, recipes, variables

_MADE = (architecture, permissions, variables, limits, metrics, errors, recipes)


def main() -> None:
    """Write each page, or compare it with the committed one.

    Raises:
        SystemExit: If a page is stale, or the code says what no page can be made of.
    """
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is stale")
    is_check = parser.parse_args().check
    problems = []
    for module in _MADE:
        try:
            text = module.page()
        except ValueError as error:
            problems.append(str(error))
            continue
        if not is_check:
            module.PAGE.write_text(text, encoding="utf-8")
        elif not module.PAGE.exists() or module.PAGE.read_text(encoding="utf-8") != text:
            problems.append(f"docs/{module.PAGE.name} is stale: run make docs")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
