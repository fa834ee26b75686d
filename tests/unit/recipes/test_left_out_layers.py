"""The start of a recipe names what its adapter does not reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.recipes.experiment import resume
from tinsmith.recipes.experiment.resume import ResumableRun


@pytest.mark.parametrize(
    ("adapter", "layers", "end"),
    [
        pytest.param(
            "lora", ("a.*.gate", "b"), "; its adapter does not reach a.*.gate, b", id="some"
        ),
        pytest.param("lora", (), "are in runs/x", id="none"),
        pytest.param("full", ("a.*.gate",), "are in runs/x", id="full"),
    ],
)
def test_the_first_line_of_a_run_names_them(
    monkeypatch: pytest.MonkeyPatch, adapter: str, layers: tuple[str, ...], end: str
) -> None:
    info = SimpleNamespace(is_lora=adapter == "lora")
    run = SimpleNamespace(name="run-1", base_model="m", info=info)
    monkeypatch.setattr(resume, "create_run", lambda *_: run)
    model = SimpleNamespace(base_model="m", layers_without_adapters=layers)
    client: Any = SimpleNamespace(list_models=lambda: [model])
    experiment: Any = SimpleNamespace(state=None, folder="runs/x", note="", begin=lambda _: None)
    config: Any = SimpleNamespace(overwrite=False, num_steps=1, begin_from="")
    assert ResumableRun(config, client, experiment).describe().endswith(end)
