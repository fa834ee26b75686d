"""Which prompts are forgotten when there are too many: no project makes another's go."""

from __future__ import annotations

import torch

from tinsmith_engine.sampling.cache.block_pool import BlockPool
from tinsmith_engine.sampling.cache.prefix_cache import PromptCache, PromptKey

LOGITS = torch.zeros(1, 4)


def test_a_project_that_asks_much_forgets_its_own_prompts() -> None:
    cache = PromptCache(BlockPool(4), max_prompts=8)
    quiet = [PromptKey("quiet", None, (number,)) for number in range(3)]
    loud = [PromptKey("loud", None, (number,)) for number in range(100)]
    for key in [*quiet, *loud]:
        cache.add(key, [], LOGITS)
    assert [key for key in [*quiet, *loud] if key in cache] == [*quiet, *loud[-5:]]


def test_a_prompt_that_is_asked_again_is_kept_longer() -> None:
    cache = PromptCache(BlockPool(4), max_prompts=2)
    first, second, third = (PromptKey("p", None, (number,)) for number in range(3))
    cache.add(first, [], LOGITS)
    cache.add(second, [], LOGITS)
    assert cache.find(first) is not None
    cache.add(third, [], LOGITS)
    assert [key in cache for key in (first, second, third)] == [True, False, True]
