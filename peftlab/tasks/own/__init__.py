"""Tasks on the user's files whose rows are more than a text and a class: from columns to examples."""
