"""The tuning suite: measures the backends, and chooses between them only on evidence."""
