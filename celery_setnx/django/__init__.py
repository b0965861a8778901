"""The app for Django's INSTALLED_APPS: `manage.py check` tells what workers refuse."""
