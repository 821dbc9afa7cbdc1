"""Fixtures of the chaos tests: real redis-servers."""

from tests.redis_servers import redis_binary, redis_server, shared_redis

__all__ = ["redis_binary", "redis_server", "shared_redis"]
