"""A table of tasks and rows over seeds: its numbers, and the console's, CSV's, LaTeX's and HTML's way to show them."""
