"""How parameters train: one folder per method, the table that lists them, and injection into a model."""
