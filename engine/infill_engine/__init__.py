"""The resident engine: tokens, canvases, models and caches. Knows no LSP and no parser.

Importing this package, or its `protocol`, does not import torch.
"""
