"""Client for tokenbus workers: LLM jobs over Redis streams or ZeroMQ, tokens streamed back."""

from tokenbus._version import __version__
from tokenbus.client import AsyncClient, JobOptions, make_request
from tokenbus.dealer import CurveKeys
from tokenbus.door import Timeouts
from tokenbus.errors import TokenbusError
from tokenbus.events import Done, JobStatus, Started, Tokens, Usage
from tokenbus.request import JobRequest, SamplingParams
from tokenbus.stream import JobStream
from tokenbus.sync import Client, SyncStream

__all__ = [
    "AsyncClient",
    "Client",
    "CurveKeys",
    "Done",
    "JobOptions",
    "JobRequest",
    "JobStatus",
    "JobStream",
    "SamplingParams",
    "Started",
    "SyncStream",
    "Timeouts",
    "TokenbusError",
    "Tokens",
    "Usage",
    "__version__",
    "make_request",
]
