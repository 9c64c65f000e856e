"""Data files become tables of columns: bounded in memory, text unchanged, every bad row named."""
