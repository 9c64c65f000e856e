"""What people see of a run: console tables, an offline HTML page, model cards."""
