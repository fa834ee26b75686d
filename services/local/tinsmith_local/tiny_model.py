"""A tiny Qwen3 model, made on the spot, so that the demo and the tests need no download.

Architecture, file layout and chat template are those of a real Qwen3 checkpoint; only the size
differs. Weights are random from a fixed seed, so the model knows nothing: whatever it can do later
was trained into it through the service.

The tokenizer is a byte-level BPE trained here on shipped text. Its few merges come from the words
of the chat template and of the recipes' instructions, which are counted far more often than the
phrases. A template then costs few tokens, while the words of a phrase stay nearly letter by letter.
A small model needs that to move the letters of a word that it never saw. Each digit is one token.

A directory is complete when its marker holds two digests: of the settings, texts and format version
that determine the content, and of the files as written. Anything else, such as the rest of an
interrupted build, is built again in a scratch directory. It is moved into place file by file,
marker last.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tinsmith.recipes.tasks.pig_latin import load_phrases
from tinsmith.whole_files import sha256_of

FORMAT_VERSION = 1
"""Raise it when the same settings give other files."""

MARKER_NAME = ".tinsmith-complete.json"

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""In this order they are the tokens 0, 1 and 2."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    '{{ \'A call: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] "
    "+ '\\n</tool_response><|im_end|>' + '\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{% set arguments = call['function']['arguments'] %}"
    "{{ arguments if arguments is string else arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML with tools, as Qwen3 writes it, without thinking."""

SCAFFOLD_TEXTS = ("user\n", "assistant\n", "Pig Latin:", "Repeat:")
"""Texts that stand in nearly every prompt of the demo."""

SCAFFOLD_COUNT = 3000
"""How often each counts; above any letter pair of the phrases, so the merges begin with these."""

NUM_MERGES = 22
"""Enough for the scaffold texts; the next merges would join letters of the phrases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModelConfig:
    """Shape and seed of a tiny model; the defaults are the demo's."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 384
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    initializer_range: float = 0.08
    """Standard deviation of every matrix at the start: about 1 / sqrt(hidden_size). At this size
    copying and carrying appear much later in training with the usual 0.02."""
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in asdict(self).items() if k != "seed"}
        wrong = [name for name, value in sizes.items() if value <= 0]
        if wrong:
            raise ValueError(f"must be positive: {', '.join(wrong)}")
        if self.num_heads % self.num_key_value_heads:
            raise ValueError("num_heads must be a multiple of num_key_value_heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even: rotary embeddings turn pairs")


def build_tiny_model(directory: Path | str, config: TinyModelConfig | None = None) -> Path:
    """Write a tiny Qwen3 model in Hugging Face layout, unless it is there and complete.

    The same settings give the same bytes under one version of torch, tokenizers and safetensors.

    Args:
        directory: Where the files go; made if missing. Files of other names are left alone.
        config: Shape and seed; the demo's when missing.

    Returns:
        The directory, absolute.
    """
    config = config or TinyModelConfig()
    directory = Path(directory).absolute()
    texts = load_phrases()
    digest = _digest_recipe(config, texts)
    build_once(directory, digest, lambda scratch: _write_files(scratch, config))
    return directory


def build_once(directory: Path, digest: str, write: Callable[[Path], None]) -> None:
    """Let the files of a recipe be written, unless the directory is complete by its digest."""
    if _is_complete(directory, digest):
        return
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=directory))
    try:
        write(scratch)
        _finish_directory(scratch, directory, digest)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _finish_directory(scratch: Path, directory: Path, digest: str) -> None:
    """Move the files of a model into place, marker last."""
    names = sorted(path.name for path in scratch.iterdir())
    files = {name: sha256_of(scratch / name) for name in names}
    marker = {"recipe": digest, "files": files}
    (directory / MARKER_NAME).unlink(missing_ok=True)
    for name in names:
        (scratch / name).replace(directory / name)
    (scratch / MARKER_NAME).write_text(_to_json(marker), encoding="utf-8")
    (scratch / MARKER_NAME).replace(directory / MARKER_NAME)


def _is_complete(directory: Path, digest: str) -> bool:
    """Say whether a directory holds every file of this recipe, with the content then written."""
    try:
        marker = json.loads((directory / MARKER_NAME).read_text(encoding="utf-8"))
        return bool(marker["recipe"] == digest) and all(
            sha256_of(directory / name) == found for name, found in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What a tokenizer has beside single letters.

    Attributes:
        special_tokens: In this order they are its first tokens.
        chat_template: How it writes conversations.
        words: Texts that become few tokens.
        num_merges: How many pairs are joined.
    """

    special_tokens: tuple[str, ...] = SPECIAL_TOKENS
    chat_template: str = CHAT_TEMPLATE
    words: tuple[str, ...] = ()
    num_merges: int = NUM_MERGES


def train_tokenizer(texts: tuple[str, ...], settings: TokenizerSettings | None = None) -> Tokenizer:
    """Train the byte-level BPE on phrases and scaffold texts; a pure function of its input."""
    settings = settings or TokenizerSettings()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(settings.special_tokens) + len(alphabet) + settings.num_merges,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in settings.special_tokens
        ],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    scaffold = SCAFFOLD_TEXTS + settings.words
    tokenizer.train_from_iterator([*texts, *(scaffold * SCAFFOLD_COUNT)], trainer)
    return tokenizer


def write_tokenizer(
    directory: Path, *, max_tokens: int, settings: TokenizerSettings | None = None
) -> int:
    """Write the tokenizer and its settings; return the size of its vocabulary."""
    settings = settings or TokenizerSettings()
    tokenizer = train_tokenizer(load_phrases(), settings)
    tokenizer.save(str(directory / "tokenizer.json"))
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(settings.special_tokens[1:]),
        "clean_up_tokenization_spaces": False,
        "chat_template": settings.chat_template,
    }
    (directory / "tokenizer_config.json").write_text(_to_json(document), encoding="utf-8")
    return tokenizer.get_vocab_size()


def _write_files(directory: Path, config: TinyModelConfig) -> None:
    vocab_size = write_tokenizer(directory, max_tokens=config.max_position_embeddings)
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)
    turn_end = SPECIAL_TOKENS.index(TURN_END)
    documents = {
        "config.json": _model_config(config, vocab_size, eos=turn_end, pad=end_of_text),
        "generation_config.json": {
            "do_sample": True,
            "temperature": 1.0,
            "eos_token_id": [turn_end, end_of_text],
            "pad_token_id": end_of_text,
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(_to_json(document), encoding="utf-8")
    weights = _make_weights(config, vocab_size)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _model_config(
    config: TinyModelConfig, vocab_size: int, *, eos: int, pad: int
) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": config.initializer_range,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "float32",
    }


def _make_weights(config: TinyModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """Draw all matrices in a fixed order from one generator; norms are ones."""
    generator = torch.Generator(device="cpu").manual_seed(config.seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_norm": config.head_dim,
        "self_attn.k_norm": config.head_dim,
    }

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)

    weights = {"model.embed_tokens.weight": draw(vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in matrices.items():
            weights[f"{prefix}.{name}.weight"] = draw(rows, columns)
        for name, size in norms.items():
            weights[f"{prefix}.{name}.weight"] = torch.ones(size)
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights


def _digest_recipe(config: TinyModelConfig, texts: tuple[str, ...]) -> str:
    recipe = {
        "format_version": FORMAT_VERSION,
        "config": asdict(config),
        "texts": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        "scaffold": [*SCAFFOLD_TEXTS, SCAFFOLD_COUNT, NUM_MERGES],
        "chat_template": CHAT_TEMPLATE,
    }
    return recipe_digest(recipe)


def recipe_digest(recipe: Mapping[str, object]) -> str:
    """Return the digest of all that determines the files of a model."""
    return hashlib.sha256(_to_json(recipe).encode()).hexdigest()


def _to_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
