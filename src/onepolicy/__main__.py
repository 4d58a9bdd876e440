"""`python -m onepolicy ...`, where the console script is not on the path."""

from onepolicy.cli.main import main

main()
