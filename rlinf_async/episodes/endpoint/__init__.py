"""The endpoint of episodes: for agents that speak OpenAI's or Anthropic's interfaces over HTTP."""

from rlinf_async.episodes.endpoint.config import EndpointConfig
from rlinf_async.episodes.endpoint.server import Endpoint

__all__ = ["Endpoint", "EndpointConfig"]
