"""Draft kind ``pard``: a draft model that writes several tokens in one pass."""
