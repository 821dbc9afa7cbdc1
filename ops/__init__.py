"""Running a worker: command line, settings, supervisor, health, scripts."""
