"""Chat templates: Jinja in a sandbox, with the functions that models' templates use."""
