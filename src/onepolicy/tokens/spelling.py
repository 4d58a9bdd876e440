"""Old name of `alphabet` and `components`."""

from onepolicy.tokens.alphabet import SPACE
from onepolicy.tokens.components import canonical, canonical_decoder, canonical_post, components

__all__ = ["SPACE", "canonical", "canonical_decoder", "canonical_post", "components"]
