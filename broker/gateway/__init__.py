"""The ZeroMQ door: frames in, jobs to the ledger; events out, one message a client and step."""
