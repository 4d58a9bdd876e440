"""Stand-in until S2 writes it."""

from onepolicy.types import Listing


def weigh(evidence):
    return [], Listing("Causes", ("cause", "answer"), ())
