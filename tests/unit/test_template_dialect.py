"""What is read from the text of a chat template."""

from __future__ import annotations

import pytest

from tinsmith.text.template_dialect import reads_parts
from tinsmith_local import tiny_model, tiny_vision_model


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for part in message.content %}{{ part.text }}{% endfor %}", True),
        ("{% for part in message['content'] %}{{ part['text'] }}{% endfor %}", True),
        ('{% for part in message["content"] or [] %}{{ part.text }}{% endfor %}', True),
        ("{% for part in content %}{{ part.text }}{% endfor %}", True),
        ("{% for part in contents %}{{ part.text }}{% endfor %}", False),
        ("{{ message['content'] }}", False),
        (tiny_vision_model.CHAT_TEMPLATE, True),
        (tiny_model.CHAT_TEMPLATE, False),
    ],
)
def test_a_template_that_loops_over_a_content_reads_parts(template: str, expected: bool) -> None:
    assert reads_parts(template) is expected
