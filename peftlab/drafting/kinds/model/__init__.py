"""Draft kind ``model``: a second, smaller language model."""
