"""Sphinx configuration. Built with -W: a warning is an error."""

project = "onepolicy"
copyright = "the onepolicy authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["_build", "_generate.py"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# the pages of the finding codes live in the package, where `onepolicy explain` reads them
suppress_warnings = ["myst.xref_missing"]
