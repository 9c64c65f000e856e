"""Reports of finished runs: one as a file, several beside each other, and how a result is used."""
