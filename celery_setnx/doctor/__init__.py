"""What is wrong with an app, and with the server of its locks."""

from celery_setnx.doctor.app import Finding, check
from celery_setnx.doctor.server import examine

__all__ = ["Finding", "check", "examine"]
