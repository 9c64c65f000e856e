"""How a draft is made: text by the target, objectives in bounded memory, kinds of draft, checks, measures, export."""
