"""The engine side of a worker: one thread, one loop; scheduler, KV cache, runner, models,
loaders."""
