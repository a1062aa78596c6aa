"""How Sphinx makes the site from the repository's pages; `make docs` runs it."""

import sys
from pathlib import Path

import ipu_pipeline

sys.path.insert(0, str(Path(__file__).parent))  # for the extensions in this folder

project = "ipu_pipeline"
author = "The ipu_pipeline authors"
copyright = author  # noqa: A001  # Sphinx's name
version = release = ipu_pipeline.__version__

# The source is the repository, so that links between its pages are as they are in the repository.
root_doc = "docs/site/index"
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/api/*.md",
    "docs/how_to/*.md",
    "docs/site/*.md",
    "tutorial/**.md",
    "tutorial/notebooks/*.ipynb",
    "examples/**.md",
    "benchmarks/README.md",
]
exclude_patterns = [".*", "build", "ipu_pipeline", "tests", "**/__pycache__", "docs/design.md"]
exclude_patterns += ["tutorial/notebooks/*.md"]  # the sources of notebooks

extensions = [
    "graphcore_names",
    "myst_nb",
    "plain_text",
    "reference",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 4  # named as they are on GitHub
nb_execution_mode = "off"  # what cells print stands in the notebooks, and is tested
nitpicky = True
# Of a name that several classes have, written without its module, the first is meant.
suppress_warnings = ["ref.python"]

autodoc_member_order = "alphabetical"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80  # longer ones have a line for each parameter
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "pydata_sphinx_theme"
html_title = f"ipu_pipeline {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # index.html, which leads to the root page
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "header_links_before_dropdown": 5,
    "navbar_align": "left",
    "navigation_with_keys": True,
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "footer_start": [],
    "footer_end": [],
}
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
