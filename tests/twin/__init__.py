"""The scripts once more, in Python: to be removed when contracts and scenarios find each changed line."""
