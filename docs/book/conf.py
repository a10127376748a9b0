"""Settings of Sphinx for ``workshop book``, which copies this folder beside the pages of the course."""

project = "Multi-GPU and multi-node PyTorch training"
html_title = "Multi-GPU PyTorch"
author = ""
copyright = "the authors of this course; MIT license"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
root_doc = "index"
exclude_patterns = ["_static"]

# The notebooks keep the outputs of their committed runs. A page loads nothing from other hosts.
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_merge_streams = True
nb_render_markdown_format = "myst"
myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_links_external_new_tab = True
myst_ref_domains = ["std"]  # a link to a heading is not one to a function of this name
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure", "ref.python"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

toc_object_entries = False  # otherwise each page copies the names of all functions, for half of the time of a build
autodoc_member_order = "bysource"
autodoc_mock_imports = ["jax", "optax", "deepspeed", "h5py"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
