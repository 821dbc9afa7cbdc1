"""Every job's state, from acceptance to its one terminal event."""
