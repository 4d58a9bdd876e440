"""A chat template for each fault, written for this project, with the code and the class that it is expected to give."""

from __future__ import annotations

from template_texts import CLEAN, chatml

#: a reply with a question after it
_OLD = (
    "{% set later = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list %}"
    "{% set old = m.role == 'assistant' and later | length > 0 %}"
)
_TEXT_OR = "{{ c.function.arguments if c.function.arguments is string else c.function.arguments"
_SPLIT = (
    "{% set t = m.content.split('</think>')[0].split('<think>')[-1] %}{% set a = m.content.split('</think>')[-1] %}"
)


def _calls(arguments: str) -> str:
    return chatml(
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        '{{ \'<call>{"name": "\' ~ c.function.name ~ \'", "arguments": \' }}'
        + arguments
        + "{{ '}</call>' }}{% endfor %}"
    )


#: name -> template, code, class
FAULTS: dict[str, tuple[str, str, str]] = {
    "thinking emptied": (
        chatml(
            f"{{% if old and '</think>' in m.content %}}{_SPLIT}{{{{ '<think>\\n\\n</think>' ~ a }}}}"
            "{% else %}{{ m.content }}{% endif %}",
            before=_OLD,
        ),
        "history-rewritten-by-template",
        "thinking-emptied",
    ),
    "thinking dropped": (
        chatml("{% if old %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}", before=_OLD),
        "history-rewritten-by-template",
        "thinking-dropped",
    ),
    "thinking doubled": (
        chatml(
            f"{{% if old and '</think>' in m.content %}}{_SPLIT}{{{{ '<think>' ~ t ~ '</think>' ~ m.content }}}}"
            "{% else %}{{ m.content }}{% endif %}",
            before=_OLD,
        ),
        "history-rewritten-by-template",
        "thinking-doubled",
    ),
    "thinking moved": (
        chatml(
            f"{{% if old and '</think>' in m.content %}}{_SPLIT}{{{{ a ~ '<think>' ~ t ~ '</think>' }}}}"
            "{% else %}{{ m.content }}{% endif %}",
            before=_OLD,
        ),
        "history-rewritten-by-template",
        "thinking-moved",
    ),
    "thinking inserted": (
        chatml(
            "{% if m.role == 'assistant' and '<think>' not in m.content %}"
            "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
            "{{ m.content }}"
        ),
        "history-rewritten-by-template",
        "thinking-inserted",
    ),
    "thinking spacing": (
        chatml("{{ m.content.replace('</think>\\n\\n', '</think>\\n') if old else m.content }}", before=_OLD),
        "history-rewritten-by-template",
        "thinking-spacing",
    ),
    "content trimmed": (chatml("{{ m.content | trim }}"), "history-rewritten-by-template", "content-stripped"),
    "content stripped on the left": (
        chatml("{{ m.content.lstrip() }}"),
        "history-rewritten-by-template",
        "content-stripped",
    ),
    "content stripped on the right": (
        chatml("{{ m.content.rstrip('\\n') }}"),
        "history-rewritten-by-template",
        "content-stripped",
    ),
    "system prompt for one question only": (
        chatml(
            "{{ m.content }}",
            head="{% if messages|length == 1 and messages[0].role != 'system' %}"
            "{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}",
        ),
        "history-rewritten-by-template",
        "system-prompt-changed",
    ),
    "number of messages in the head": (
        chatml("{{ m.content }}", head="{{ '<|im_start|>system\\n' ~ messages|length ~ ' messages<|im_end|>\\n' }}"),
        "history-rewritten-by-template",
        "system-prompt-changed",
    ),
    "date": (
        chatml("{{ m.content }}", head="{{ strftime_now('%Y-%m-%d') ~ '\\n' }}"),
        "history-rewritten-by-template",
        "date-in-prompt",
    ),
    "time": (
        chatml("{{ m.content }}", head="{{ strftime_now('%H:%M:%S') ~ '\\n' }}"),
        "history-rewritten-by-template",
        "time-in-prompt",
    ),
    "random": (
        chatml("{{ m.content }}", head="{{ range(100000)|random ~ '\\n' }}"),
        "history-rewritten-by-template",
        "random-text",
    ),
    "tool results joined": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\\n' }}{% endif %}"
        "{{ '<r>' ~ m.content ~ '</r>' }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{% else %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "history-rewritten-by-template",
        "tool-results-merged",
    ),
    "stop only after the last reply": (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}"
        "{% if m.role != 'assistant' or loop.last %}{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "history-rewritten-by-template",
        "stop-changed",
    ),
    "extra after the last message": (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        "history-rewritten-by-template",
        "last-message-only",
    ),
    "old replies dropped": (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
        "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "history-rewritten-by-template",
        "reply-dropped",
    ),
    "only the last three messages": (
        "{% for m in messages[-3:] %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "history-rewritten-by-template",
        "earlier-turns-changed",
    ),
    "content in upper case": (
        chatml("{{ m.content|upper if old else m.content }}", before=_OLD),
        "history-rewritten-by-template",
        "content-rewritten",
    ),
    "opener in the prompt only": (
        chatml("{{ m.content }}", generation="<|im_start|>assistant\\n<think>\\n").replace(
            "{{ m.content }}", "{{ m.content.replace('<think>\\n', '') }}"
        ),
        "generation-prompt-differs",
        "opener-only-in-prompt",
    ),
    "no generation prompt": (
        CLEAN.split("{% if add_generation_prompt %}")[0],
        "generation-prompt-differs",
        "missing",
    ),
    "blank before the reply": (
        chatml("{{ ' ' if m.role == 'assistant' }}{{ m.content }}"),
        "generation-prompt-differs",
        "space-before-reply",
    ),
    "empty thinking in the prompt only": (
        chatml("{{ m.content }}", generation="<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"),
        "generation-prompt-differs",
        "thinking-only-in-prompt",
    ),
    "arguments encoded twice": (_calls("{{ c.function.arguments | tojson }}"), "tool-call-rewritten", "double-encoded"),
    "arguments as Python": (_calls("{{ c.function.arguments }}"), "tool-call-rewritten", "python-repr"),
    "keys sorted": (
        _calls(f"{_TEXT_OR} | tojson(sort_keys=true) }}}}"),
        "tool-call-rewritten",
        "key-order",
    ),
    "other separators": (
        _calls(f"{_TEXT_OR} | tojson(separators=(',', ':')) }}}}"),
        "tool-call-rewritten",
        "separators",
    ),
    "escapes": (
        _calls(f"{_TEXT_OR} | tojson(ensure_ascii=true) }}}}"),
        "tool-call-rewritten",
        "escapes",
    ),
    "indented": (
        _calls(f"{_TEXT_OR} | tojson(indent=2) }}}}"),
        "tool-call-rewritten",
        "indent",
    ),
    "two BOS": ("{{ bos_token }}" + chatml("{{ m.content }}", head="{{ bos_token }}"), "double-bos", "template"),
}
