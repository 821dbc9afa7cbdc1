"""Text of one model: prompts to token ids, token ids to text. Knows no job's state and no door."""
