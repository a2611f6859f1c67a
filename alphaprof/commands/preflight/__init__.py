"""A dry run: what a profile would find, looked at before it runs."""
