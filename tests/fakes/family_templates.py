"""Chat templates that behave as those of published families do, written anew in a few lines each.

What they differ in: which roles and forms of contents they know, where thoughts and calls go, and
what they refuse.
"""

from __future__ import annotations

from tests.fakes.chat_models import QWEN3, QWEN3_VL, QWEN25_VL

from tinsmith.text.named_templates import ROLE_COLON

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}</tools> as <tool_call>\n<|im_end|>\n{% endif %}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}" + ASK
)
"""Any role, texts alone, no tools."""
QWEN25 = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% elif m.tool_calls %}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{% set call = call.function %}"
    '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + ASK
)
QWEN3_FIRST = (
    TOOLS + "{% for m in messages %}{% set text = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content is string %}"
    "{% set thought = m.reasoning_content %}{% elif '</think>' in m.content %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{% if thought and loop.last %}"
    "{% set text = '<think>\n' + thought + '\n</think>\n\n' + text %}{% endif %}{% endif %}"
    "{% if m.role in ('system', 'user', 'assistant', 'tool') %}"
    "<|im_start|>{{ m.role + '\n' + text }}" + CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + ASK
)
"""Looks for a thought in a content, which must be a text; passes over other roles."""
QWEN3_THINKING = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% endif %}"
)
"""Thinks in every turn: the prompt begins a thought, and an answer without one closes it."""
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {% if loop.first and system is defined %}"
    "<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}{{ m['content'].strip() }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'].strip() }} <|im_end|>{% endif %}"
    "{% endfor %}"
)
LLAMA3 = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}"
    'Respond as {"name": , "parameters": }{% endif %}'
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}<|im_start|>assistant\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>"
    "{% elif m.role == 'tool' or m.role == 'ipython' %}<|im_start|>ipython\n"
    "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endif %}"
    "{% endfor %}" + ASK
)
"""One call at once, without the text beside it; results of tools as JSON."""
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set asked = (rest | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and m == asked %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "[INST]{% if m == asked and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}"
    "[/INST]{% elif m.tool_calls is defined and m.tool_calls %}[TOOL_CALLS]["
    "{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}{{ call.function | tojson }}{% endfor %}]<|im_end|>"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}<|im_end|>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
GEMMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
GEMMA3 = (
    "{% if messages[0].role == 'system' %}{% set first = (messages[0].content if "
    "messages[0].content is string else messages[0].content[0].text) + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
    "{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first }}{% if m.content is string %}{{ m.content | trim }}"
    "{% elif m.content is iterable %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|image_pad|>{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}"
    "{% else %}{{ raise_exception('Invalid content type') }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
"""The system's text before the first question; images; of a list of parts of it, the first."""
DEEPSEEK_V3 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}<|Assistant|>"
    "{% for call in m.tool_calls %}<|call|>{{ call.type + '<|sep|>' + call.function.name + "
    "'\n```json\n' + call.function.arguments + '\n```' }}{% endfor %}<|im_end|>"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content }}<|im_end|>"
    "{% elif m.role == 'tool' %}<|output|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
"""Calls where the content is null alone; their arguments as they were sent."""
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is not none %}{% set text = m.content %}"
    "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "<|Assistant|>{{ text }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""Hides all thoughts, and begins one in each turn."""
GPT_OSS = (
    "{% if messages[0].role in ('developer', 'system') %}{% set rest = messages[1:] %}"
    "<|start|>developer<|message|># Instructions\n\n{{ messages[0].content }}"
    "{% else %}{% set rest = messages %}<|start|>developer<|message|>{% endif %}"
    "{% for tool in tools or [] %}\n// {{ tool.function.description }}\n"
    "type {{ tool.function.name }} = ({% for key, value in "
    "(tool.function.parameters.properties or {}).items() %}// {{ value.description }}\n"
    "{{ key }}: {{ value.type }}{% endfor %});{% endfor %}<|end|>"
    "{% for m in rest %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% set later = rest[loop.index:] | selectattr('role', 'equalto', 'assistant') | "
    "rejectattr('tool_calls', 'defined') | list %}"
    "{% if not later %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% elif m.content %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endif %}<|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|message|>{{ m.tool_calls[0].function.arguments | tojson "
    "}}<|call|>{% else %}{% if loop.last and m.thinking %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}<|im_end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|message|>{{ m.content | tojson }}"
    "<|end|>{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Knows developers; thoughts in a channel of their own, hidden once there is an answer."""
PHI3 = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] }}"
    "{% elif m['role'] == 'user' %}"
    "{{ '<|user|>\n' + m['content'] + '<|im_end|>\n<|assistant|>\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
LFM2 = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% set text = m.content %}"
    "{% if text is not string %}{% set text = text | tojson %}{% endif %}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] | trim %}{% endif %}{{ text }}<|im_end|>\n"
    "{% endfor %}" + ASK
)
"""What is no text is written as JSON; no calls."""
NEMOTRON = (
    TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set text = m.content | default('', true) %}{% if m.reasoning_content %}"
    "{% set text = '<think>\n' + m.reasoning_content + '\n</think>\n' + text %}"
    "{% elif '<think>' not in text %}{% set text = '<think></think>' + text %}{% endif %}"
    "{% if not loop.last and '</think>' in text %}"
    "{% set text = '<think></think>' + text.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>assistant\n{{ text }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ call.function.name }}>{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>{{ value }}</parameter>{% endfor %}</function></tool_call>{% endfor %}"
    "<|im_end|>\n{% elif m.role in ('user', 'system') %}<|im_start|>{{ m.role + '\n' + m.content }}"
    "<|im_end|>\n{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Always thinks; calls as parameters of their own, which have to be an object."""
SMOLVLM = (
    "{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<|image_pad|>' }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Lists of parts alone."""

FAMILIES = {
    "chatml": CHATML,
    "qwen2.5": QWEN25,
    "qwen2.5-vl": QWEN25_VL,
    "qwen3-first": QWEN3_FIRST,
    "qwen3": QWEN3,
    "qwen3-vl": QWEN3_VL,
    "qwen3-thinking": QWEN3_THINKING,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
    "gpt-oss": GPT_OSS,
    "phi3": PHI3,
    "lfm2": LFM2,
    "nemotron": NEMOTRON,
    "smolvlm": SMOLVLM,
    "role_colon": ROLE_COLON,
}
