"""Text to documents, tokens and packed batches."""
