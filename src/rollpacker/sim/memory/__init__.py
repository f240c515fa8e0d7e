"""Predict by arithmetic on shapes whether a job fits, without loading or allocating anything."""
