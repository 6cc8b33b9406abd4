"""Smaller examples, a file each: a gang that trains together, many small steps, a partitioned backfill under a quota."""
