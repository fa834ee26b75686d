"""Metrics of this process, read as a scrape reads them."""

from prometheus_client import REGISTRY


def metric(name: str, **labels: str) -> float:
    """Return the value of a metric; one with labels is 0 before it was counted.

    A metric without labels must exist.
    """
    value = REGISTRY.get_sample_value(name, labels)
    if labels:
        return value or 0.0
    assert value is not None, f"there is no metric {name}"
    return value
