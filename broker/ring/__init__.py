"""The shared-memory mailbox between broker and engine."""
