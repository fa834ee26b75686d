"""A task of Inspect: words, and what each is to be answered with."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Scorer, exact
from inspect_ai.solver import generate

WORDS = ("cat", "dog", "sun", "tree", "moon", "leaf", "bird", "stone")


@task
def words() -> Task:
    """Expect one answer to all."""
    return words_with(["yes"] * len(WORDS), exact())


@task
def words_and_two_others() -> Task:
    """Expect another answer to two of them."""
    return words_with(["no"] * 2 + ["yes"] * (len(WORDS) - 2), exact())


def words_with(targets: list[str], scorer: Scorer) -> Task:
    """Return a task whose words have these answers."""
    samples = [
        Sample(input=word, target=target) for word, target in zip(WORDS, targets, strict=True)
    ]
    return Task(dataset=MemoryDataset(samples, name="words"), solver=generate(), scorer=scorer)
