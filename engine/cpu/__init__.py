"""CPU runner: the engine's plans executed with torch operators."""
