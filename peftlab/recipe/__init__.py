"""Recipes: the schema, YAML with errors by file and line, overrides, and the shipped recipes."""
