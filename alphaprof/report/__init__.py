"""One `Report` value, many renderings."""
