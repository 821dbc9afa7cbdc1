"""The bus side of a worker: two doors, the ledger, the queue, and the rings to the engine. No
torch."""
