"""Tests of training a head."""
