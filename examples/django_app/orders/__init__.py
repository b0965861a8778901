"""Customers, their orders, and what they come to."""
