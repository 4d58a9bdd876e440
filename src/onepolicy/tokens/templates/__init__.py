"""Chat templates: rendered in a limited child process, and checked for what breaks rollouts of several turns.

`check_template` answers whether a template is safe for multi-turn RL; `compare_templates` whether two sides render the
same; `ChatTemplate.render` gives the text of `apply_chat_template(tokenize=False)`; `suffix_after_stop` what a rollout
of sampled ids lacks between turns.
"""

from __future__ import annotations

from onepolicy.tokens.templates.check import TemplateReport, bind, check_template
from onepolicy.tokens.templates.compare import Comparison, compare_templates
from onepolicy.tokens.templates.conversations import Conversation, built_in, conversation_from, load_conversations
from onepolicy.tokens.templates.process import Child, Limits, TemplateFailure
from onepolicy.tokens.templates.render import ChatTemplate
from onepolicy.tokens.templates.stop import StopText, find_stop, suffix_after_stop

__all__ = [
    "ChatTemplate",
    "Child",
    "Comparison",
    "Conversation",
    "Limits",
    "StopText",
    "TemplateFailure",
    "TemplateReport",
    "bind",
    "built_in",
    "check_template",
    "compare_templates",
    "conversation_from",
    "find_stop",
    "load_conversations",
    "suffix_after_stop",
]
