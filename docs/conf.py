"""Makes a site of the pages: `sphinx-build -W --keep-going docs build/site`.

1. A page is plain Markdown, so that it also reads well where there is no site. Only docs/api/ needs one.
2. The lists of links in the pages of `LISTS` are the table of contents. A page that is in none of them is a warning.
   ARCHITECTURE.md and CONTRIBUTING.md are pages of the site, too (`FROM_ROOT`).
3. A docstring is plain text, made for `help`: `Args:` and `Raises:` with a list, and examples that are indented.
"""

from __future__ import annotations

import importlib.metadata
import re

from sphinx.application import Sphinx

LISTS = {"index", "tutorials", "how-to", "reference", "explanation", "api/index"}
FROM_ROOT = {"ARCHITECTURE": "architecture", "CONTRIBUTING": "contributing"}

project = "Ronde"
author = "The Ronde developers"
release = importlib.metadata.version("ronde")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may begin a table's section one level lower than its neighbours
default_role = "code"
smartquotes = False
highlight_language = "none"  # of blocks that name no language: commands and output

autodoc_member_order = "bysource"
autodoc_mock_imports = [
    "distributed",
    "py4j",
    "pyflink",
    "pyspark",
    "ray",
]  # the site needs no engine of a cluster
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = f"Ronde {release}"
html_theme_options = {
    "logo": {"text": "Ronde"},
    "navbar_align": "left",
    "navigation_depth": 2,
    "show_toc_level": 2,
    "footer_start": [],
    "footer_end": [],
}
html_sidebars: dict[str, list[str]] = {"index": []}
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Make a table of contents of the pages that a list of links names; name the pages that are not in the site."""
    for file, name in FROM_ROOT.items():
        source[0] = source[0].replace(f"](../{file}.md)", f"]({name}.md)")
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./[A-Z]+\.md\)", r"`\1`", source[0])
    if page in LISTS:
        names = re.findall(r"^- \[[^\]]*\]\(([\w/-]+)\.md\)", source[0], re.MULTILINE)
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", *dict.fromkeys(names), "```\n"])


def mark_examples(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make code of the indented paragraphs of a docstring that belong to no section, and links of the pages."""
    marked: list[str] = []
    before, in_section = "", False  # the line before, and whether `Args:` or the like came last
    for line in lines:
        is_indented = line.startswith("    ")
        if line and not is_indented:
            in_section = re.fullmatch(r"(Args|Returns|Raises|Yields):", line) is not None
        if is_indented and not before.strip() and not in_section and not _is_indented(marked):
            marked += [".. code-block:: python", ""]
        marked.append(re.sub(r"\bdocs/([\w-]+)\.md", r":doc:`/\1`", line))
        before = line
    lines[:] = marked


def _is_indented(lines: list[str]) -> bool:
    """Return whether the last line that is not empty is indented."""
    return next((line for line in reversed(lines) if line.strip()), "").startswith("    ")


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", mark_examples, priority=400)  # before napoleon
