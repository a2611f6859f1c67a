"""Left of the log: models and data. Nothing here computes statistics over documents."""
