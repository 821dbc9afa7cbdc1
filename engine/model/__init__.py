"""Model facts and weight containers, independent of device and checkpoint format."""
