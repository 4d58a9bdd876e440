"""The command line: one verb, one file. Nothing is computed here."""
