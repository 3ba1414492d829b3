"""Encodings for models written elsewhere: attached to one instance, removable, without touching a class or a module."""
