"""`python -m tinsmith_local`: the same as `tinsmith up`."""

from __future__ import annotations

import typer

from tinsmith_local.commands import up

if __name__ == "__main__":
    typer.run(up)
