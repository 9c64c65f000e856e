"""What a person writes: the schema, YAML with file and line in every complaint, overrides, shipped recipes."""
