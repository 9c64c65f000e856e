"""peftlab: parameter-efficient finetuning of pretrained transformers.

The public API, listed in ``__init__.pyi``, is imported on first use: ``import peftlab`` alone loads neither torch
nor transformers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
