"""Broken and hostile input: mutated recipes, adapters, weights, configurations and data through the command line.

``python -m tests.fuzz --inputs 2000 --seed 0`` runs them. Whatever an input is, the command line ends within 20
seconds with status 0, or with status 2 and one message; and what it accepts is compared with an independent reading
of the mutated file (none of it uses peftlab's readers).
"""

import os

# Before anything imports the hub's client, which reads them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("COLUMNS", "200")
