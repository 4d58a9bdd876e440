"""onepolicy makes the two engines of LLM reinforcement learning one policy, or says exactly why they are not."""

__version__ = "0.1.0"
