"""One recipe or verb from start to end, one file each; nothing heavy is imported before it is needed."""
