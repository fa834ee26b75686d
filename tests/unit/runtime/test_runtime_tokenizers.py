"""A base model without a tokenizer is refused at start: no client could write a prompt for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith_runtime.errors import ModelNotFoundError
from tinsmith_runtime.text.tokenizer_files import require_tokenizers


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"holds no tokenizer\.json"):
        require_tokenizers({"a": tmp_path})
    (tmp_path / "tokenizer.json").write_text("{}")
    require_tokenizers({"a": tmp_path})


def test_what_is_no_directory_is_left_to_who_fetches_it(tmp_path: Path) -> None:
    require_tokenizers({"hub": "owner/name", "gone": str(tmp_path / "gone")})
