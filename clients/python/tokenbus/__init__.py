"""Client for tokenbus workers: LLM jobs over Redis streams or ZeroMQ, tokens streamed back."""

from tokenbus._version import __version__

__all__ = ["__version__"]
