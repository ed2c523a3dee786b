"""attnx inside other libraries' models.

Each module imports the library that it serves, so none is imported by the core.
"""
