"""Logged decisions as Parquet files with a manifest: written, checked, and read back."""
