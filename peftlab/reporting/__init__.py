"""Shows runs to people: console tables, offline HTML pages, model cards."""
