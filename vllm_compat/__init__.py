"""Makes a consumer library work on newer runtimes by patches applied when the consumer is imported."""

__version__ = "0.1.0"
