"""How a draft is made: the objectives it is trained with, and their computation in bounded memory."""
