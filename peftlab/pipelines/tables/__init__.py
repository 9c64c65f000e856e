"""Tables of many runs: their cells in processes of their own, their results gathered."""
