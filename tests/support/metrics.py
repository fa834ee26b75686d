"""Metrics of this process, read as a scrape reads them."""

from prometheus_client import REGISTRY


def metric(name: str) -> float:
    """Return the value of a metric without labels, which must exist."""
    value = REGISTRY.get_sample_value(name)
    assert value is not None, f"there is no metric {name}"
    return value
