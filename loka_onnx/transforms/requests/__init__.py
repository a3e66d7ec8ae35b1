"""Requests of one user and many candidates: a user's features once."""
