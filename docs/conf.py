"""Settings of the documentation site: Sphinx with MyST Markdown."""

from peftlab import __version__

project = "peftlab"
author = "the peftlab authors"
copyright = f"2026, {author}"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
html_theme = "furo"
html_title = "peftlab"
