"""How parameters train: a file or folder for each method, the table that lists them, and injection into a model."""
