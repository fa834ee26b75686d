"""The tokenizer of a model as files with one digest, so that a laptop fetches them once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from tinsmith.text.tokenizer import Tokenizer
from tinsmith.v1 import scheduler_pb2
from tinsmith_runtime.errors import ModelNotFoundError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES_FOLDER = "additional_chat_templates"
"""Where transformers keeps templates that have a name, such as `tool_use.jinja`."""
_FILE_NAMES = (
    "tokenizer.json",
    TOKENIZER_CONFIG_FILE,
    TEMPLATE_FILE,
    f"{NAMED_TEMPLATES_FOLDER}/tool_use.jinja",
)
_PROCESSOR_TEMPLATE = "chat_template.json"
"""Where processors of models that read images once kept the template."""
TEMPLATE_FILES = (TEMPLATE_FILE, _PROCESSOR_TEMPLATE)


def read_tokenizer(directory: Path) -> scheduler_pb2.Tokenizer:
    """Return the tokenizer files of a model directory in Hugging Face layout.

    The digest is the SHA-256 over the sorted names and contents; empty without a `tokenizer.json`.
    """
    paths = (directory / name for name in _FILE_NAMES)
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    old = directory / _PROCESSOR_TEMPLATE
    if TEMPLATE_FILE not in files and old.is_file():
        source = json.loads(old.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(source, str):
            files[TEMPLATE_FILE] = source.encode()
    if "tokenizer.json" not in files:
        return scheduler_pb2.Tokenizer()
    return scheduler_pb2.Tokenizer(digest=digest_of(files), files=files)


def read_chat_template(directory: Path) -> str | None:
    """Return the default chat template of a model directory; None if it has none."""
    files = dict(read_tokenizer(directory).files)
    return Tokenizer(files).chat_template if files else None


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 over the sorted names and contents of files, in hex."""
    digest = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def require_tokenizers(models: Mapping[str, str | Path]) -> None:
    """Refuse base models without a tokenizer, which no client could use.

    Args:
        models: Directory or hub id by name; a hub id is looked at once it has been fetched.

    Raises:
        ModelNotFoundError: If a directory holds no `tokenizer.json`.
    """
    for source in models.values():
        directory = Path(source)
        is_model = (directory / "config.json").is_file()
        if is_model and not (directory / _FILE_NAMES[0]).is_file():
            raise ModelNotFoundError(
                f"directory {directory} holds no {_FILE_NAMES[0]}, so no client could write a"
                " prompt for it; save the tokenizer there with"
                " AutoTokenizer.from_pretrained(...).save_pretrained(...)",
                model=directory,
            )


def read_stop_token_ids(directory: Path) -> list[int]:
    """Return the tokens that end a turn: those of the settings, and of the chat template.

    A base model whose settings end texts learns from its chat template to end turns; without the
    template's own token it would go on to the limit.

    Raises:
        ModelNotFoundError: If the directory holds a tokenizer that is none.
    """
    tokens = _end_tokens_of_settings(directory)
    files = dict(read_tokenizer(directory).files)
    if files:
        try:
            tokenizer = Tokenizer(files)
        except Exception as error:
            # The library raises nothing more special.
            raise ModelNotFoundError(
                f"the tokenizer in {directory} cannot be read: {error}", model=directory
            ) from error
        known = (tokenizer.token_to_id(end) for end in tokenizer.turn_ends)
        tokens += [token for token in known if token is not None and token not in tokens]
    return tokens


def _end_tokens_of_settings(directory: Path) -> list[int]:
    """Return `eos_token_id` of the generation or model settings."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        if found is not None:
            return [int(token) for token in (found if isinstance(found, list) else [found])]
    return []
