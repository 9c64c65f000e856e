"""How a draft is used and measured: sampling, verification (pure functions), the arithmetic of its gain."""
