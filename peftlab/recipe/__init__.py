"""What a person writes: schema, YAML whose every complaint has file and line, overrides, shipped recipes."""
