"""How a draft is used and measured: sampling, verification (pure functions) and the arithmetic of its gain."""
