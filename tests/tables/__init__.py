"""Tests of mmpos.tables."""
