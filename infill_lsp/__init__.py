"""The language server: what editors and code mean. Knows no tensors; of the engine it knows only the protocol."""

__version__ = "0.1.0"
