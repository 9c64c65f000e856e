"""How a draft is made: text by the target, objectives in bounded memory, heads, preflight, measures, export."""
