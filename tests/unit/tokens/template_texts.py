"""Chat templates for the tests, in the manner of model families; all are written for this project."""

from __future__ import annotations

CLEAN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: ChatML that keeps everything: thinking in a field, calls, results, tools, append-only.
KEEPING = """\
{%- if tools %}
{{- '<|im_start|>tools\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {%- if m.reasoning_content %}
        {{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content if m.content is string else '' }}
    {%- for c in m.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' ~ c.function.name ~ '", "arguments": ' }}
        {{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

#: In the manner of a hybrid thinking model: old thinking goes, results share one user message, thinking can be off.
HYBRID = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(asked=messages|length - 1, open=true) %}
{%- for m in messages[::-1] %}
    {%- set i = (messages|length - 1) - loop.index0 %}
    {%- if seen.open and m.role == 'user' and m.content is string %}
        {%- set seen.open = false %}
        {%- set seen.asked = i %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > seen.asked and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- text.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + text }}
        {%- endif %}
        {%- for c in m.tool_calls or [] %}
            {%- if (loop.first and text) or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set f = c.function or c %}
            {{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

#: In the manner of a template with a date in its header, trimmed content, one call a reply.
DATED = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set head = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set head = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}
    {{- 'Functions:\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- head + '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.tool_calls is defined and m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('one call a reply, please') }}
        {%- endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f.name + '", "parameters": ' }}
        {{- f.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- (m.content if m.content is string else m.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

#: In the manner of [INST]: strict roles, a blank before each reply, system text in the first question.
BRACKETS = """\
{%- if messages[0].role == 'system' %}
    {%- set head = messages[0].content + '\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set head = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- set ns = namespace(n=0) %}
{%- for m in rest %}
    {%- if m.role in ('user', 'assistant') and not m.tool_calls %}
        {%- if (m.role == 'user') != (ns.n % 2 == 0) %}
            {{- raise_exception('user and assistant must take turns') }}
        {%- endif %}
        {%- set ns.n = ns.n + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if loop.first and tools %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (head if loop.first else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for c in m.tool_calls %}
            {%- set out = c.function | tojson %}
            {{- out[:-1] + ', "id": "' + c.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string }}
        {{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool roles') }}
    {%- endif %}
{%- endfor %}
"""

#: In the manner of a model that always thinks: the prompt opens the thinking, every rendered reply loses it.
ALWAYS_THINKING = """\
{%- set ns = namespace(head='', first=true) -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.head = ns.head + m.content -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}{{- ns.head -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'assistant' -%}
{%- if m.tool_calls -%}
{%- for c in m.tool_calls -%}
{{- ('<｜Assistant｜><｜calls｜>' if loop.first else '\\n') + c.function.name -}}
{{- '\\n```json\\n' + c.function.arguments + '\\n```' -}}
{%- endfor -%}{{- '<｜end▁of▁sentence｜>' -}}
{%- else -%}
{%- set text = m.content.split('</think>')[-1] if '</think>' in m.content else m.content -%}
{{- '<｜Assistant｜>' + text + '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- elif m.role == 'tool' -%}{{- '<｜result｜>' + m.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}
"""

REALISTIC: dict[str, str] = {
    "keeping": KEEPING,
    "hybrid": HYBRID,
    "dated": DATED,
    "brackets": BRACKETS,
    "always-thinking": ALWAYS_THINKING,
}


def chatml(body: str, head: str = "", generation: str = "<|im_start|>assistant\\n", before: str = "") -> str:
    """ChatML with `body` (Jinja) for a message's text, after `before` (Jinja, for each message)."""
    return (
        f"{head}{{% for m in messages %}}{before}{{{{ '<|im_start|>' ~ m.role ~ '\\n' }}}}{body}"
        f"{{{{ '<|im_end|>\\n' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{generation}' }}}}{{% endif %}}"
    )
