"""Measurements, one module each; `tokenbus bench NAME` runs `main(argv)` of the module NAME."""
